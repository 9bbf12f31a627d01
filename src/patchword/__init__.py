"""patchword: a workbench for Vision Transformers. Train one on a laptop, inspect it, evaluate it, and serve it.

Example:
    import patchword as pw

    model = pw.create_model("B/16", num_classes=10, image_size=384)  # random weights
    model = pw.load_model("ViT-B_16.npz", image_size=384)  # any public checkpoint
    pw.Classifier.load("hf:google/vit-base-patch16-224")("cat.jpg").label
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

# The module of each public name, imported on first use, so that `patchword --help` does not import torch.
_MODULES = {
    "AugmentConfig": "config",
    "Callback": "training",
    "Checkpoint": "checkpoints",
    "Classifier": "inference.classifier",
    "Config": "config",
    "ConfigError": "errors",
    "DataConfig": "config",
    "DatasetSplits": "data.sources",
    "DistillConfig": "config",
    "OptimConfig": "config",
    "PatchwordError": "errors",
    "Preprocess": "data.preprocess",
    "ProgressiveResizeConfig": "config",
    "ResNetConfig": "config",
    "RunInfo": "training",
    "ScheduleConfig": "config",
    "TrainResult": "training",
    "ViT": "models",
    "ViTConfig": "config",
    "adapt_model": "models",
    "attention_maps": "inspection.capture",
    "augmentation": "config.presets",
    "build_model": "models",
    "create_model": "models",
    "embed": "inference.embed",
    "evaluate": "evaluation.evaluate",
    "features": "inspection.capture",
    "from_arrays": "data.sources",
    "load_model": "checkpoints",
    "load_recipe": "recipes",
    "open_data": "data.resolve",
    "optimize_for_cpu": "models",
    "patchify": "models",
    "preset": "config.presets",
    "probe": "evaluation.probe",
    "read_checkpoint": "checkpoints",
    "resume": "training",
    "train": "training",
    "unpatchify": "models",
    "write_checkpoint": "checkpoints",
}
__all__ = [
    "AugmentConfig",
    "Callback",
    "Checkpoint",
    "Classifier",
    "Config",
    "ConfigError",
    "DataConfig",
    "DatasetSplits",
    "DistillConfig",
    "OptimConfig",
    "PatchwordError",
    "Preprocess",
    "ProgressiveResizeConfig",
    "ResNetConfig",
    "RunInfo",
    "ScheduleConfig",
    "TrainResult",
    "ViT",
    "ViTConfig",
    "adapt_model",
    "attention_maps",
    "augmentation",
    "build_model",
    "create_model",
    "embed",
    "evaluate",
    "features",
    "from_arrays",
    "load_model",
    "load_recipe",
    "open_data",
    "optimize_for_cpu",
    "patchify",
    "preset",
    "probe",
    "read_checkpoint",
    "resume",
    "train",
    "unpatchify",
    "write_checkpoint",
]

if TYPE_CHECKING:
    from .checkpoints import Checkpoint, load_model, read_checkpoint, write_checkpoint
    from .config import (
        AugmentConfig,
        Config,
        DataConfig,
        DistillConfig,
        OptimConfig,
        ProgressiveResizeConfig,
        ResNetConfig,
        ScheduleConfig,
        ViTConfig,
    )
    from .config.presets import augmentation, preset
    from .data.preprocess import Preprocess
    from .data.resolve import open_data
    from .data.sources import DatasetSplits, from_arrays
    from .errors import ConfigError, PatchwordError
    from .evaluation.evaluate import evaluate
    from .evaluation.probe import probe
    from .inference.classifier import Classifier
    from .inference.embed import embed
    from .inspection.capture import attention_maps, features
    from .models import ViT, adapt_model, build_model, create_model, optimize_for_cpu, patchify, unpatchify
    from .recipes import load_recipe
    from .training import Callback, RunInfo, TrainResult, resume, train


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'patchword' has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
