"""The documentation's own examples: Python blocks run on stand-in files, command lines parse, links exist."""

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from helpers.small_checkpoint import make_checkpoint
from patchword.checkpoints import write_checkpoint
from patchword.cli import main as cli
from patchword.errors import ConfigError
from patchword.metrics.calibration import PRIOR_STD
from patchword.report.inspection_panels import NAMES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples/README.md", ROOT / "results/README.md"]
)
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )?(?:torchrun .*? -m )?patchword ([a-z].*?)(?:\s+# .*|\s+\|.*)?$")
PLACEHOLDER = re.compile(r"\[--|MODEL OUT --to|--to \w+\|")  # a synopsis, not a command line
OLD_NAMES = ("upgrading.md", "LOG.md")  # their command lines may have old names


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON_BLOCKS = [
    pytest.param(block, id=f"{page_id(page)}-{number}")
    for page in PAGES
    for number, (language, block) in enumerate(FENCE.findall(page.read_text()))
    if language == "python"
]


def command_lines() -> Iterator[tuple[str, str]]:
    """Page and arguments of every `patchword` command line in a fenced block or in `inline code`."""
    for page in PAGES:
        if page.name in OLD_NAMES:
            continue
        text = page.read_text()
        lines = [line for language, block in FENCE.findall(text) if not language for line in block.splitlines()]
        lines += re.findall(r"`(patchword [a-z][^`]* [^`]*)`", FENCE.sub("", text))
        for line in lines:
            if (match := COMMAND.match(line.strip())) and not PLACEHOLDER.search(line):
                yield page_id(page), match[1]


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint("ViT-B_16.npz", make_checkpoint(activation="gelu_tanh"), "google")
    Path("runs").mkdir()
    for name in ("vit-b16", "runs/photos"):
        write_checkpoint(name, make_checkpoint())
    for name in ("cat.jpg", "new.jpg"):
        Image.new("RGB", (60, 40), "orange").save(name)
    exec(compile(block, "example", "exec"), {})


def test_there_are_examples() -> None:
    assert len(PYTHON_BLOCKS) >= 7
    assert len(list(command_lines())) >= 40


@pytest.mark.parametrize(("page", "arguments"), [pytest.param(*row, id=": ".join(row)) for row in command_lines()])
def test_command_lines_parse(page: str, arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {name: do_nothing(command) for name, command in cli.COMMANDS.items()})
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("my_recipe.py").write_text("from patchword.config import Config\n\nconfig = Config()\n")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    assert cli.run_command(shlex.split(arguments)) == 0


def test_command_line_check_finds_unknown_flags() -> None:
    with pytest.raises(ConfigError) as error:
        cli.run_command(["evaluate", "model", "photos", "--against", "other"])
    assert error.value.code == "unknown_option"


def do_nothing(command: Callable[..., int]) -> Callable[..., int]:
    """A command with the same flags and help that returns at once."""

    @functools.wraps(command)
    def stub(*arguments: object, **options: object) -> int:
        return 0

    return stub


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OLD_NAMES], ids=page_id)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:tests|benchmarks|results|src)/[\w/.-]+\.(?:py|json|md))\b", text):
        assert (ROOT / path).exists(), path
    if page.parts[-2:] == ("docs", "architecture.md") or page.parent.name == "decisions":
        for path in re.findall(r"`([a-z]+/[a-z0-9_/]+\.py)`", text):
            candidates = (ROOT / "src/patchword" / path, ROOT / path)
            assert any(c.exists() for c in candidates), path


def test_documented_prior_of_the_temperature() -> None:
    expected = f"normal prior on the log of the temperature (mean 0, standard deviation {PRIOR_STD:g})"
    assert expected in (ROOT / "docs/train.md").read_text()


def test_documented_figures() -> None:
    text = (ROOT / "docs/inspect.md").read_text()
    assert not [name for name in NAMES if f"`{name}`" not in text]
