"""Processes that save a checkpoint while a call of the operating system fails: children of `runs.Nursery`.

    faulty_save.py RUN           nothing fails; prints the names of the calls
    faulty_save.py RUN CALL      the CALL-th call (from 0) is a kill
    faulty_save.py RUN KIND      for each call a copy RUN-0, RUN-1, ... in which it fails; prints what was said in each

KIND is "ENOSPC" (the disk is full and stays so), "EIO" (one call fails) or "gone" (all calls fail from then on).
"""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from patchword.checkpoints.checkpoint import Checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import Preprocess
from patchword.errors import CheckpointError
from patchword.training.checkpointing import CheckpointStore, Snapshot

CALLS = {n: getattr(os, n) for n in ["open", "write", "fsync", "mkdir", "rename", "scandir", "unlink", "rmdir"]}
CREATING = ("write", "fsync", "mkdir")  # what a full disk refuses
NEW = 30  # the step that is saved
CONFIG = ViTConfig(
    image_size=(8, 8), patch_size=(4, 4), in_channels=1, num_classes=2, embed_dim=8, depth=0, num_heads=1
)


def content(step: int) -> tuple[Snapshot, Checkpoint]:
    """What the checkpoint of a step holds: other numbers for each step."""
    model = {"head.weight": torch.full((2, 8), float(step)), "head.bias": torch.arange(2.0) + step}
    state = {"optim.head.weight.exp_avg": torch.full((2, 8), step / 3), "optim.head.weight.step": torch.tensor(step)}
    preprocess = Preprocess((8, 8), mean=(0.5,), std=(0.5,))
    snapshot = Snapshot(step, step / 7, 10 * step, None, state)
    return snapshot, Checkpoint(CONFIG, model, preprocess, ("no", "yes"))


class Faults:
    """Stands between Python and the operating system, and lets call number `call` fail."""

    def __init__(self, call: int, kind: str) -> None:
        self.call, self.kind, self.seen = call, kind, list[str]()

    def __enter__(self) -> "Faults":
        for name, real in CALLS.items():
            setattr(os, name, self.between(name, real))
        return self

    def __exit__(self, *failure: object) -> None:
        for name, real in CALLS.items():
            setattr(os, name, real)

    def between(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            number = len(self.seen)
            self.seen.append(name)
            if number == self.call or (self.lasting(name) and number > self.call >= 0):
                if name == "write" and number == self.call:  # half of it gets through before the fault
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self.strike()
            return real(*arguments, **options)

        return call

    def lasting(self, name: str) -> bool:
        """Whether a call after the first that failed fails, too."""
        return self.kind == "gone" or (self.kind == "ENOSPC" and name in CREATING)

    def strike(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = errno.ENOSPC if self.kind == "ENOSPC" else errno.EIO
        raise OSError(code, os.strerror(code))


def save(run: Path, call: int, kind: str) -> list[str]:
    """The names of the calls of a save."""
    store, saved = CheckpointStore(run, keep_last=2), content(NEW)
    store.load()
    with Faults(call, kind) as faults:
        store.save(*saved)
    return faults.seen


def main(run: Path, what: str = "") -> None:
    if what.isdigit():
        save(run, int(what), "kill")
    elif what:
        shutil.copytree(run, f"{run}-clean")
        for number in range(len(save(Path(f"{run}-clean"), -1, ""))):
            shutil.copytree(run, f"{run}-{number}")
            try:
                save(Path(f"{run}-{number}"), number, what)
                print(json.dumps("nothing"))
            except CheckpointError as error:
                print(json.dumps(str(error)))
    else:
        print(*save(run, -1, ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
