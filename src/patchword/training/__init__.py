"""Training: `train` starts a run, `resume` continues one; both give the same result, however often it is killed."""

from .callbacks import Callback, RunInfo, TrainResult
from .nan_guard import replay
from .start_run import resume, train

__all__ = ["Callback", "RunInfo", "TrainResult", "replay", "resume", "train"]
