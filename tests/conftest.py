"""Where tests find real weights, real pictures and golden outputs, and what they do without them."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("PATCHWORD_SHARED", Path(__file__).parents[2] / "shared"))


def shared_path(relative: str) -> Path:
    """A file or folder of the shared data, or a skip that says what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs {relative} of the shared data (set PATCHWORD_SHARED)", allow_module_level=True)
    return path


@pytest.fixture(scope="session")
def ti16() -> Path:
    """Real ViT-Ti/16 ImageNet weights, as timm publishes them."""
    return shared_path("weights/vit_ti16_augreg_in1k/model.safetensors")


@pytest.fixture(scope="session")
def imagenet() -> Path:
    """1,000 ImageNet validation pictures, a folder for each class index."""
    return shared_path("data/imagenet1000")
