"""Overrides of config fields, with their short forms and implied changes; durations."""

from typing import Any

import pytest

from patchword.config import Config, ResNetConfig, ViTConfig
from patchword.config.overrides import apply_overrides, config_flags, parse_duration
from patchword.config.presets import augmentation, preset
from patchword.errors import ConfigError
from patchword.recipes import load_recipe

FINETUNE = load_recipe("finetune")
SCRATCH = load_recipe("cifar10_scratch")


def test_fields_and_sections() -> None:
    changed = apply_overrides(SCRATCH, {"optim.lr": 3e-4, "seed": 7, "model.drop_path": 0.1})
    assert (changed.optim.lr, changed.seed) == (3e-4, 7)
    assert isinstance(changed.model, ViTConfig)
    assert changed.model.drop_path == 0.1
    assert changed.optim.name == SCRATCH.optim.name
    assert apply_overrides(SCRATCH, {}) == SCRATCH


def test_short_forms() -> None:
    assert apply_overrides(SCRATCH, {"model": "S/16"}).model == preset("S/16")
    assert isinstance(apply_overrides(SCRATCH, {"model": "R50x1"}).model, ResNetConfig)
    assert apply_overrides(SCRATCH, {"augment": "light"}).augment == augmentation("light")
    assert apply_overrides(SCRATCH, {"data": "photos"}).data.source == "photos"
    assert apply_overrides(SCRATCH, {"budget": "10m"}).budget == 600
    assert apply_overrides(SCRATCH, {"freeze": "blocks.0."}).freeze == ("blocks.0.",)
    assert apply_overrides(SCRATCH, {"loggers": "tensorboard"}).loggers == ("tensorboard",)
    for none in ("none", ["none"], ("none",)):
        assert apply_overrides(FINETUNE, {"freeze": none}).freeze == ()


def test_section_and_its_fields_together() -> None:
    """In any order, also if the fields are valid only together."""
    changes = {"model": "Ti/16", "model.embed_dim": 250, "model.num_heads": 5}
    for order in (changes, dict(reversed(changes.items()))):
        model = apply_overrides(FINETUNE, order).model
        assert isinstance(model, ViTConfig)
        assert (model.embed_dim, model.num_heads, model.depth) == (250, 5, 12)


@pytest.mark.parametrize("length", [{"steps": 5}, {"epochs": 5}, {"budget": 60}])
def test_length_replaces_another_length(length: dict[str, Any]) -> None:
    base = SCRATCH.replace(budget=None, steps=3) if "budget" in length else SCRATCH
    changed = apply_overrides(base, length)
    assert changed.steps == length.get("steps")
    assert changed.budget == length.get("budget")


def test_model_replaces_init() -> None:
    assert FINETUNE.init is not None
    for changes in ({"model": "S/16"}, {"init": "none"}, {"init": ""}, {"init": None}):
        changed = apply_overrides(FINETUNE, changes)
        assert (changed.init, changed.freeze, changed.wise_ft_alpha) == (None, (), 1.0)


def test_lora_replaces_freeze() -> None:
    changed = apply_overrides(FINETUNE, {"lora_rank": 4})
    assert (changed.freeze, changed.init) == ((), FINETUNE.init)


def test_regularization_applies_to_init() -> None:
    changed = apply_overrides(FINETUNE, {"model.drop_path": 0.1})
    assert changed.init == FINETUNE.init
    assert isinstance(changed.model, ViTConfig)
    assert changed.model.drop_path == 0.1


def test_architecture_of_init_cannot_be_changed() -> None:
    with pytest.raises(ConfigError) as error:
        apply_overrides(FINETUNE, {"model.depth": 6, "model.drop_path": 0.1})
    assert error.value.code == "override_ignored"
    assert "model.depth" in str(error.value)
    assert "model.drop_path" not in str(error.value)
    assert apply_overrides(FINETUNE, {"model": "S/16", "model.depth": 6}).model.depth == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "both", [{"steps": 5, "budget": "1m"}, {"epochs": 1, "steps": 5}, {"model": "S/16", "init": "a"}]
)
def test_contradictions(both: dict[str, Any]) -> None:
    names = sorted(both, key=["model", "init", "budget", "steps", "epochs"].index)
    with pytest.raises(ConfigError, match="^--" + " .*--".join(names)) as error:
        apply_overrides(FINETUNE, both)
    assert error.value.code == "invalid_config"


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [("optim.lrr", "lr"), ("optm.lr", ""), ("epoch", "epochs"), ("seed.x", ""), ("model.embed_dims", "embed_dim")],
)
def test_unknown_path(path: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as error:
        apply_overrides(SCRATCH, {path: 1})
    assert error.value.code == "unknown_field"
    assert path.split(".", 1)[-1] in str(error.value)
    assert suggestion in str(error.value)


def test_flags_of_every_field() -> None:
    flags = config_flags(Config())
    assert flags["--optim.layer-decay"] == "optim.layer_decay"
    assert flags["--model.embed-dim"] == "model.embed_dim"
    assert flags["--progressive-resize.scale"] == "progressive_resize.scale"
    assert flags["--optim"] == "optim"
    assert "--model.width-factor" in config_flags(load_recipe("resnet_baseline"))
    assert not [flag for flag in flags if "section" in flag]


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (90, 90), (0.5, 0.5), ("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), ("2d", 172800),
        ("1d2h3m4s", 93784),
    ],
)  # fmt: skip
def test_durations(duration: float | str, seconds: float) -> None:
    assert parse_duration(duration) == seconds


@pytest.mark.parametrize("duration", ["", "10x", "m10", "1h-3m", "-5m", "1 h", "ten", True, "1.h"])
def test_not_a_duration(duration: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_duration(duration)
    assert error.value.code == "invalid_duration"
    assert repr(duration) in str(error.value)


def test_num_classes_of_a_run_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        apply_overrides(Config(), {"model": "Ti/16", "model.num_classes": 7})
    assert error.value.code == "override_ignored"
    assert "--model.num-classes" in str(error.value)
