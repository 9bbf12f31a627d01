"""Save a checkpoint while a system call fails; run by `runs.ForkServer`.

    faulty_save.py RUN           nothing fails; prints the names of the system calls
    faulty_save.py RUN CALL      the process is killed at call number CALL (from 0)
    faulty_save.py RUN KIND      makes a copy RUN-0, RUN-1, ... for each call, in which that call fails; prints a JSON
                                 line for each: [error code, message], or null if the save succeeded

KIND is "ENOSPC" (the disk is full and stays full), "EIO" (one call fails) or "disconnected" (all later calls fail).
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
NEED_SPACE = ("write", "fsync", "mkdir")  # the calls that fail on a full disk
NEW_STEP = 30  # the step that is saved
CONFIG = ViTConfig(
    image_size=(8, 8), patch_size=(4, 4), in_channels=1, num_classes=2, embed_dim=8, depth=0, num_heads=1
)


def make_snapshot(step: int) -> tuple[Snapshot, Checkpoint]:
    """Make the content of a step's checkpoint, with different values for each step."""
    model = {"head.weight": torch.full((2, 8), float(step)), "head.bias": torch.arange(2.0) + step}
    state = {"optim.head.weight.exp_avg": torch.full((2, 8), step / 3), "optim.head.weight.step": torch.tensor(step)}
    preprocess = Preprocess((8, 8), mean=(0.5,), std=(0.5,))
    snapshot = Snapshot(step, step / 7, 10 * step, None, state)
    return snapshot, Checkpoint(CONFIG, model, preprocess, ("no", "yes"))


class FaultInjector:
    """Patches functions of `os` so that call number `call` fails."""

    def __init__(self, call: int, kind: str) -> None:
        self.call, self.kind, self.calls = call, kind, list[str]()

    def __enter__(self) -> "FaultInjector":
        for name, original in CALLS.items():
            setattr(os, name, self.wrap(name, original))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, original in CALLS.items():
            setattr(os, name, original)

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            if number == self.call or (self.keeps_failing(name) and number > self.call >= 0):
                if name == "write" and number == self.call:  # half of the data is written before the fault
                    original(args[0], args[1][: len(args[1]) // 2])
                self.fail()
            return original(*args, **kwargs)

        return patched

    def keeps_failing(self, name: str) -> bool:
        """Whether calls after the first failure fail, too."""
        return self.kind == "disconnected" or (self.kind == "ENOSPC" and name in NEED_SPACE)

    def fail(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = errno.ENOSPC if self.kind == "ENOSPC" else errno.EIO
        raise OSError(code, os.strerror(code))


def save(run: Path, call: int, kind: str) -> list[str]:
    """Save a checkpoint with a fault; return the names of the system calls."""
    store, saved = CheckpointStore(run, keep_last=2), make_snapshot(NEW_STEP)
    store.load()
    with FaultInjector(call, kind) as injector:
        store.save(*saved)
    return injector.calls


def main(run: Path, fault: str = "") -> None:
    if fault.isdigit():
        save(run, int(fault), "kill")
    elif fault:
        shutil.copytree(run, f"{run}-clean")
        for number in range(len(save(Path(f"{run}-clean"), -1, ""))):
            shutil.copytree(run, f"{run}-{number}")
            try:
                save(Path(f"{run}-{number}"), number, fault)
                print(json.dumps(None))
            except CheckpointError as error:
                print(json.dumps([error.code, str(error)]))
    else:
        print(*save(run, -1, ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
