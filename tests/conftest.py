"""Where tests find real weights, real images and golden outputs, and what they do without them."""

import os
from pathlib import Path

import pytest

from helpers.shared_data import shared_path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has one core: two processes with two threads each would slow each other down. Set before torch is
    # imported, and passed on to the commands that tests run.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ti16() -> Path:
    """Real ViT-Ti/16 ImageNet weights, as timm publishes them."""
    return shared_path("weights/vit_ti16_augreg_in1k/model.safetensors")


@pytest.fixture(scope="session")
def imagenet() -> Path:
    """1,000 ImageNet validation images, one folder per class index."""
    return shared_path("data/imagenet1000")
