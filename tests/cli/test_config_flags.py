"""Config fields as flags."""

from typing import Any

import pytest

from patchword.cli.config_flags import (
    RENAMED_FLAGS,
    as_list,
    extract_config_flags,
    model_flags,
    parse_field,
    renamed_flags,
    run_flags,
    value_kind,
)
from patchword.config.overrides import flag_of
from patchword.errors import ConfigError
from patchword.recipes import load_recipe


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (int, "single"),
        (float | None, "single"),
        (tuple[int, int], "numbers"),
        (tuple[float, ...] | None, "numbers"),
        (tuple[str, ...], "words"),
    ],
)
def test_value_kind(hint: Any, kind: str) -> None:
    assert value_kind(hint) == kind


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (["3"], 3),
        (["1e-6"], 1e-6),
        (["True"], True),
        (["None"], None),
        (["average"], "average"),
        (["32", "64"], [32, 64]),
    ],
)
def test_parse_field(texts: list[str], value: Any) -> None:
    assert parse_field("--flag", texts) == value


def test_flag_needs_a_value() -> None:
    with pytest.raises(ConfigError, match="--depth .*value"):
        extract_config_flags(["predict", "--depth"], model_flags())


def test_numbers_end_at_the_first_other_argument() -> None:
    rest, values = extract_config_flags(["--image-size", "32", "48", "64.png", "x.png"], model_flags())
    assert rest == ["64.png", "x.png"]
    assert values == {"image_size": [32, 48]}


def test_underscores_and_hyphens_are_the_same() -> None:
    for flag in ("--num-heads", "--num_heads"):
        assert extract_config_flags([flag, "3"], model_flags()) == ([], {"num_heads": 3})


def test_words_are_always_a_list() -> None:
    flags = run_flags(load_recipe("finetune"))
    name = next(flag for flag, kind in flags.items() if kind == "words")
    field = name.removeprefix("--").replace("-", "_")
    assert extract_config_flags([name, "csv"], flags)[1] == {field: ["csv"]}


def test_run_flags_reach_nested_sections() -> None:
    flags = run_flags(load_recipe("finetune"))
    assert flags["--optim.lr"] == "single"
    assert flags["--budget"] == "single"


def test_renamed_flags_include_old_config_fields() -> None:
    renamed = renamed_flags()
    assert renamed["--positions"] == "--pos-embed"
    assert renamed["--optim.clip"] == "--optim.clip-grad-norm"
    assert set(RENAMED_FLAGS) <= set(renamed)


def test_renamed_config_flags_exist() -> None:
    known = {*run_flags(load_recipe("finetune")), *model_flags()}
    config_flags = {old: new for old, new in renamed_flags().items() if old not in RENAMED_FLAGS}
    missing = [new for new in config_flags.values() if new not in known and not new.startswith("--model.")]
    assert missing == []


def test_flag_of_and_as_list() -> None:
    assert flag_of("optim.head_lr_scale") == "--optim.head-lr-scale"
    assert as_list(1) == [1]
    assert as_list([1, 2]) == [1, 2]
