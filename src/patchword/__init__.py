"""patchword: Vision Transformers you can train on a laptop, see through, trust, and ship.

import patchword as pw

model = pw.create("B/16", num_classes=10, image_size=384)      # fresh weights
model = pw.load("ViT-B_16.npz", image_size=384)                # any public checkpoint
pw.Classifier.load("hf:google/vit-base-patch16-224")("cat.jpg").label
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives; looked up on first use, so that `patchword --help` need not import torch.
_PLACES = {
    "Checkpoint": "checkpoints",
    "Classifier": "classifier",
    "ConfigError": "errors",
    "PatchwordError": "errors",
    "Preprocess": "preprocess",
    "ResNetConfig": "config",
    "ViT": "models",
    "ViTConfig": "config",
    "build": "models",
    "create": "models",
    "evaluate": "evaluation",
    "load": "checkpoints",
    "patchify": "models",
    "preset": "presets",
    "read_checkpoint": "checkpoints",
    "resized": "models",
    "unpatchify": "models",
    "write_checkpoint": "checkpoints",
}
__all__ = [
    "Checkpoint",
    "Classifier",
    "ConfigError",
    "PatchwordError",
    "Preprocess",
    "ResNetConfig",
    "ViT",
    "ViTConfig",
    "build",
    "create",
    "evaluate",
    "load",
    "patchify",
    "preset",
    "read_checkpoint",
    "resized",
    "unpatchify",
    "write_checkpoint",
]

if TYPE_CHECKING:
    from .checkpoints import Checkpoint, load, read_checkpoint, write_checkpoint
    from .classifier import Classifier
    from .config import ResNetConfig, ViTConfig
    from .errors import ConfigError, PatchwordError
    from .evaluation import evaluate
    from .models import ViT, build, create, patchify, resized, unpatchify
    from .preprocess import Preprocess
    from .presets import preset


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module 'patchword' has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
