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

from patchword.data.loader import Batch, Loader
from patchword.errors import Stopped, TrainingError
from patchword.recipes import load_recipe
from patchword.training import resume, train
from patchword.training.callbacks import Callback, LogRow


class StopAt(Callback):
    """Sends this process SIGTERM after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        if row["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class PauseAt(Callback):
    """Waits after a step; the other processes then wait for the first one, within a collective operation."""

    def __init__(self, step: int, sign: Path) -> None:
        self.step, self.sign = step, sign

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        if row["step"] == self.step:
            self.sign.touch()
            while self.sign.exists():
                time.sleep(0.001)


def record(log: Path, poison: int) -> None:
    prepare = Loader.make_train_batch

    def recorded(self: Loader, batch_range: tuple[int, int]) -> Batch:
        batch = prepare(self, batch_range)
        with log.open("a") as file:
            file.writelines(f"{p} {i}\n" for p, i in zip(range(*batch_range), batch.indices, strict=True))
        if batch_range[0] == poison:
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    Loader.make_train_batch = recorded  # type: ignore[method-assign]


def main(recipe: str, run: str, log: str, stop: str = "-1", poison: str = "-1", pause: str = "-1") -> None:
    record(Path(log), int(poison))
    callbacks = (StopAt(int(stop)), PauseAt(int(pause), Path(f"{log}.paused")))
    try:
        if Path(run).exists():
            resume(run, callbacks=callbacks)
        else:
            train(load_recipe(recipe), run, callbacks=callbacks)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except TrainingError as error:
        print(error)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
