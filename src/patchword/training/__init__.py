"""Training: `train` and `resume` (loop.py), which come to the same end however often a run is killed."""

from .callbacks import Callback, RunInfo, TrainResult
from .nan_guard import replay
from .run import resume, train

__all__ = ["Callback", "RunInfo", "TrainResult", "replay", "resume", "train"]
