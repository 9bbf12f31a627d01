"""Training: `train` and `resume` (loop.py), which come to the same end however often a run is killed."""

from .guard import replay
from .loop import resume, train
from .watch import Briefing, Outcome, Watcher

__all__ = ["Briefing", "Outcome", "Watcher", "replay", "resume", "train"]
