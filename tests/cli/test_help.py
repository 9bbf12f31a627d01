"""--help, the overview, suggestions, and errors that name the flag."""

import functools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from helpers.command import run_in_process
from patchword.cli import main as cli
from patchword.cli.arguments import command_arguments, parse_doc
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


def test_overview_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, run_in_process(capsys).stdout.splitlines())) <= 80


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


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_plain_sentences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = command_page(name, COMMANDS[name], FINETUNE if name == "train" else None, everything=True)
    text = " ".join(page.split())
    assert not re.search(r"`|\bNone\b|(?<!\.)\.\.(?!\.)|[?:;,]\.(?!\w)|\N{NO-BREAK SPACE}", text)
    long = [line for line in page.splitlines() if len(line) > 80 and " " in line.strip()]
    assert all(line.startswith("Example: ") for line in long if "(default: hf:" not in line), long


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    @functools.wraps(COMMANDS[name])
    def stub(**options: object) -> int:
        calls.append(options)
        return 0

    monkeypatch.setitem(cli.COMMANDS, name, stub)
    words = shlex.split(parse_doc(COMMANDS[name]).example.partition(" > ")[0])
    assert words[:2] == ["patchword", name]
    assert cli.run_command(words[1:]) == 0
    assert len(calls) == 1


def test_help_of_train_has_the_defaults_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    page = run_in_process(capsys, "train", "cifar10_scratch", "--help").stdout
    assert re.search(r"--budget TIME.*?\(default: 10m\)", page, re.DOTALL)
    assert re.search(r"--batch-size N.*?\(default: *\n? *128\)", page, re.DOTALL)
    assert "default: 0.002" in page
    assert all("--" + name.replace("_", "-") in page for name in MAIN_FIELDS)


@pytest.mark.parametrize(
    ("what", "recipe"), [("quickstart", "quickstart"), ("digits", "quickstart"), ("photos/", "finetune")]
)
def test_help_of_train_names_the_recipe(what: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"defaults of the recipe {recipe})" in run_in_process(capsys, "train", what, "--help").stdout


def test_help_of_train_shows_only_the_length_that_counts(capsys: pytest.CaptureFixture[str]) -> None:
    page = run_in_process(capsys, "train", "cifar10_scratch", "--help").stdout
    assert "(default:" not in page[page.index("--epochs NUMBER") : page.index("--batch-size N")]


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
        (["--verison"], "There is no option --verison. Did you mean --version?"),
        (["completion", "tcsh"], "SHELL must be one of bash, zsh, fish, not 'tcsh'. Example: bash"),
        (["train", "digits", "--optim", "adam"], "--optim is a group of options and takes no value, but 'adam' is"),
        (["train", "digits", "--image-size", "big"], "--image-size needs one or more numbers, not 'big'. Example: --i"),
        (["train", "digits", "--budget", "ten"], "--budget: 'ten' is not a duration. Write 90s, 10m"),
        (["study", "positions", "--budget", "ten"], "--budget: 'ten' is not a duration. Write 90s, 10m"),
        (["train", "digits", "--budget", "0"], "--budget must be above 0 seconds, not 0.0. Example: --budget 10m"),
        (["train", "digits", "--augment", "heavy"], "--augment: There is no augmentation 'heavy'. Known: none"),
        (["train", "digits", "--model", "vit_tiny_patch16_224"], "use --init, e.g. --init hf:google/vit-base-patch16-"),
        (["train", "digits", "--model.image-size", "9"], "--model.image-size: height 9 is not a multiple of 2"),
        (["train", "digits", "--wise-ft-alpha", "0.5"], "--wise-ft-alpha 0.5 interpolates with pretrained weights"),
        (
            ["train", "digits", "--augment.scale", "1"],
            "--augment.scale must be a list of 2 numbers, not 1. Example: -",
        ),
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
    assert "93.46%" in describe_recipe("cifar10_scratch")["result"]
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
