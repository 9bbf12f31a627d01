"""Configurations of models (model.py) and training runs (train.py) as frozen dataclasses. Imports no torch."""

from .json_config import JsonConfig, cast
from .model import (
    MAX_BLOCKS,
    MAX_STAGES,
    ModelConfig,
    NonLocalForm,
    Resample,
    ResNetConfig,
    Size,
    ViTConfig,
    WeightStandardization,
)
from .train import (
    AugmentConfig,
    Config,
    DataConfig,
    DistillConfig,
    OptimConfig,
    ProgressiveResizeConfig,
    ScheduleConfig,
)

__all__ = [
    "MAX_BLOCKS",
    "MAX_STAGES",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "DistillConfig",
    "JsonConfig",
    "ModelConfig",
    "NonLocalForm",
    "OptimConfig",
    "ProgressiveResizeConfig",
    "ResNetConfig",
    "Resample",
    "ScheduleConfig",
    "Size",
    "ViTConfig",
    "WeightStandardization",
    "cast",
]
