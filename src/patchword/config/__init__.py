"""Everything that can be chosen, as frozen dataclasses: models (model.py) and training runs (train.py). No torch."""

from .json_config import JsonConfig, cast
from .model import MOST_BLOCKS, MOST_STAGES, ModelConfig, Resample, ResNetConfig, Size, Standardisation, ViTConfig
from .train import AugmentConfig, Config, DataConfig, DistillConfig, OptimConfig, ScheduleConfig

__all__ = [
    "MOST_BLOCKS",
    "MOST_STAGES",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "DistillConfig",
    "JsonConfig",
    "ModelConfig",
    "OptimConfig",
    "ResNetConfig",
    "Resample",
    "ScheduleConfig",
    "Size",
    "Standardisation",
    "ViTConfig",
    "cast",
]
