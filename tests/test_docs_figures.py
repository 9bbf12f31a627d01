"""The images of the documentation are reproducible.

Drawing figures of results/ again gives the bytes in the repository; a figure with photos may differ by rounding.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.shared_data import shared_path

DOCS = Path(__file__).parents[1] / "docs"
MAX_BYTES = 3_000_000
IMAGE_SUFFIXES = (".png", ".svg", ".jpg")


@pytest.mark.slow
def test_figures_are_drawn_from_the_stored_results(tmp_path: Path) -> None:
    command = [sys.executable, DOCS / "make_figures.py", "measured", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    drawn = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.svg")}
    assert {Path(path.name) for path in DOCS.glob("*.svg")} <= drawn.keys()
    assert [name for name in drawn if drawn[name] != (DOCS / name).read_bytes()] == []


@pytest.mark.slow
def test_photos_are_explained_as_in_the_repository(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATCHWORD_FIGURES_MODEL": str(shared_path("weights/vit_ti16_augreg_in1k/model.safetensors")),
        "PATCHWORD_FIGURES_LABELS": str(shared_path("data/imagenet_class_index.json")),
    }
    command = [sys.executable, DOCS / "make_figures.py", "hero", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    drawn, stored = (np.asarray(Image.open(folder / "images/hero.jpg"), float) for folder in (tmp_path, DOCS))
    assert np.abs(drawn - stored).mean() < 2


def test_every_image_is_made_by_the_script() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_figures.py", "--list"], check=True, capture_output=True, text=True
    )
    files = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*") if path.suffix in IMAGE_SUFFIXES}
    assert files - {"site/favicon.svg"} == set(made.stdout.split())


def test_images_are_small() -> None:
    images = [path for path in DOCS.rglob("*") if path.suffix in IMAGE_SUFFIXES]
    assert sum(path.stat().st_size for path in images) < MAX_BYTES
