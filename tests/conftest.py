"""Where tests find real weights, real images and golden outputs, and what they do without them."""

from pathlib import Path

import pytest

from helpers.shared_data import shared_path


@pytest.fixture(scope="session")
def ti16() -> Path:
    """Real ViT-Ti/16 ImageNet weights, as timm publishes them."""
    return shared_path("weights/vit_ti16_augreg_in1k/model.safetensors")


@pytest.fixture(scope="session")
def imagenet() -> Path:
    """1,000 ImageNet validation images, one folder per class index."""
    return shared_path("data/imagenet1000")
