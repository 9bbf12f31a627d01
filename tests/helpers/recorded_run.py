"""One process of a run that writes down which samples it trains on: a child of `runs.Nursery`.

    recorded_run.py RECIPE RUN LOG [STOP] [POISON] [PAUSE]

LOG gets a line "position sample" for each. After step STOP the run is asked to save and leave, as by SIGTERM; a part of
a batch that begins at position POISON holds a NaN. After step PAUSE the first process makes the file LOG.paused and
waits until that is gone. A run that exists is resumed.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from patchword.data.loader import Batch, Loader
from patchword.errors import Stopped, TrainingError
from patchword.recipes import load_recipe
from patchword.training import resume, train
from patchword.training.callbacks import Callback


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def row(self, row: dict[str, Any], progress: float, left: float) -> None:
        if (row["kind"], row["step"]) == ("train", self.step):  # once: the second signal would be obeyed at once
            os.kill(os.getpid(), signal.SIGTERM)


class PauseAt(Callback):
    """The other processes then wait for the first one, in the middle of an exchange."""

    def __init__(self, step: int, sign: Path) -> None:
        self.step, self.sign = step, sign

    def tick(self, row: dict[str, Any], progress: float, left: float) -> None:
        if row["step"] == self.step:
            self.sign.touch()
            while self.sign.exists():
                time.sleep(0.001)

    def row(self, row: dict[str, Any], progress: float, left: float) -> None:
        if row["kind"] == "train":
            self.tick(row, progress, left)


def record(log: Path, poison: int) -> None:
    prepare = Loader.training_batch

    def recorded(self: Loader, stretch: tuple[int, int]) -> Batch:
        batch = prepare(self, stretch)
        with log.open("a") as file:
            file.writelines(f"{p} {i}\n" for p, i in zip(range(*stretch), batch.indices, strict=True))
        if stretch[0] == poison:
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    Loader.training_batch = recorded  # type: ignore[method-assign]


def main(recipe: str, run: str, log: str, stop: str = "-1", poison: str = "-1", pause: str = "-1") -> None:
    record(Path(log), int(poison))
    watchers = (StopAt(int(stop)), PauseAt(int(pause), Path(f"{log}.paused")))
    try:
        if Path(run).exists():
            resume(run, watchers=watchers)
        else:
            train(load_recipe(recipe), run, watchers=watchers)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except TrainingError as error:
        print(error)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
