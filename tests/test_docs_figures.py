"""The figures of the documentation are reproducible: drawing them again gives the bytes in the repository."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
def test_figures_are_drawn_from_the_stored_results(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "make_figures.py", "--out", tmp_path], check=True, capture_output=True)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    stored = {path.name: path.read_bytes() for path in DOCS.glob("*.svg")}
    assert drawn.keys() == stored.keys()
    assert [name for name in stored if drawn[name] != stored[name]] == []
