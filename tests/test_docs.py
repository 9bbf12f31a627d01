"""The documentation's own examples run, on stand-ins for the files they name."""

import re
from pathlib import Path

import pytest
from PIL import Image

from helpers.small_checkpoint import make_checkpoint
from patchword.checkpoints import write_checkpoint
from patchword.metrics.calibration import PRIOR_STD

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint("ViT-B_16.npz", make_checkpoint(activation="gelu_tanh"), "google")
    Path("runs").mkdir()
    for name in ("vit-b16", "runs/photos"):
        write_checkpoint(name, make_checkpoint())
    Image.new("RGB", (60, 40), "orange").save("cat.jpg")
    exec(compile(block, "example", "exec"), {})


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_prior_of_the_temperature_is_the_one_that_is_documented() -> None:
    assert (
        f"normal prior on the log of the temperature (mean 0, standard deviation {PRIOR_STD:g})"
        in (ROOT / "docs/train.md").read_text()
    )
