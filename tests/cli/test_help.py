"""--help, the overview, suggestions, and errors that name the flag."""

import re
import subprocess
from pathlib import Path

import pytest

from helpers.command import run_in_process
from patchword.cli.arguments import command_arguments
from patchword.cli.help_pages import GROUPS, MAIN_FIELDS, command_page, config_fields
from patchword.cli.main import COMMANDS
from patchword.cli.model_args import MODEL_OPTIONS
from patchword.cli.shell_completion import completion_script
from patchword.recipes import RECIPES, describe_recipe, load_recipe

FINETUNE = load_recipe("finetune")


def test_overview_lists_every_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    bare, page = run_in_process(capsys), run_in_process(capsys, "help")
    assert bare.returncode == page.returncode == 0
    assert bare.stdout == page.stdout
    assert {name for commands in GROUPS.values() for name in commands} == set(COMMANDS)
    assert all(re.search(rf"^  {name} +\w.*$", bare.stdout, re.MULTILINE) for name in COMMANDS)
    assert max(map(len, bare.stdout.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_every_argument(name: str) -> None:
    config = FINETUNE if name == "train" else None
    page = command_page(name, COMMANDS[name], config, everything=False)
    assert f"Example: patchword {name}" in page
    for argument in command_arguments(COMMANDS[name]):
        assert argument.description, argument.name
        assert re.search(rf"^  {re.escape(argument.label)}\b", page, re.MULTILINE) or argument.is_positional
    assert "None)" not in page
    assert "|None" not in page


def test_help_of_train_has_the_defaults_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    page = run_in_process(capsys, "train", "cifar10_scratch", "--help").stdout
    assert re.search(r"--budget TIME.*?\(default: 10m\)", page, re.DOTALL)
    assert re.search(r"--batch-size N.*?\(default: *\n? *128\)", page, re.DOTALL)
    assert "default: 0.002" in page
    assert all("--" + name.replace("_", "-") in page for name in MAIN_FIELDS)


def test_help_all_describes_every_field() -> None:
    page = command_page("train", COMMANDS["train"], FINETUNE, everything=True)
    fields = config_fields(FINETUNE)
    assert len(fields) > 100
    assert all(field.description for field in fields)
    assert all(re.search(rf"^  {re.escape(field.label)} ", page, re.MULTILINE) for field in fields)
    predict = command_page("predict", COMMANDS["predict"], None, everything=True)
    assert all(option.label in predict and option.description for option in MODEL_OPTIONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "There is no command trian. Did you mean train?"),
        (["predict", "MODEL", "a.png", "--topp", "3"], "patchword predict has no option --topp. Did you mean --top?"),
        (["predict", "MODEL", "a.png", "--top", "x"], "--top must be an integer, not 'x'. Example: --top 5"),
        (["predict", "MODEL", "a.png", "--top"], "--top needs a value. Example: --top 5"),
        (["predict"], "patchword predict needs MODEL"),
        (["convert", "a", "b"], "patchword convert needs --to"),
        (["convert", "a", "b", "--to", "x"], "--to must be one of patchword, google"),
        (["train", "digits", "extra"], "patchword train does not take 'extra'"),
        (["train", "digits", "--optim.lr", "-1"], "--optim.lr must be above 0, not -1.0. Example: --optim.lr 0.003"),
        (["train", "digits", "--steps", "x"], "--steps must be an integer, not 'x'."),
        (["predict", "patchword:cifar10", "a.png", "--num-heads", "x"], "--num-heads must be an integer, not 'x'."),
    ],
)
def test_errors_name_the_flag_and_give_an_example(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_in_process(capsys, *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_recipes_are_listed_with_command_and_result(capsys: pytest.CaptureFixture[str]) -> None:
    page = run_in_process(capsys, "recipes").stdout
    for name in RECIPES:
        facts = describe_recipe(name)
        assert facts["summary"] and facts["command"] and facts["machine"]
        assert facts["command"] in page
    assert "93.46 %" in describe_recipe("cifar10_scratch")["result"]
    assert "seeds" in describe_recipe("cifar10_scratch")["result"]  # a result of several lines


def complete(script: Path, *words: str) -> set[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _patchword; echo ${{COMPREPLY[@]}}"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_completion_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(completion_script("bash", COMMANDS))
    assert complete(script, "patchword", "pre") == {"predict"}
    assert complete(script, "patchword", "train", "cifar10_") == {"cifar10_finetune", "cifar10_scratch"}
    assert complete(script, "patchword", "train", "x", "--optim.l") == {"--optim.lr", "--optim.layer-decay"}
    assert complete(script, "patchword", "predict", "x", "--num-h") == {"--num-heads"}
    assert completion_script("zsh", COMMANDS).endswith(completion_script("bash", COMMANDS))
    assert "-l optim.lr\n" in completion_script("fish", COMMANDS)
