"""One process of a run that logs its training samples; run by `runs.ForkServer`.

    recorded_run.py RECIPE RUN LOG [STOP] [NAN] [PAUSE]

LOG gets a line "position index" for each sample. After step STOP the process sends itself SIGTERM. The micro-batch that
begins at position NAN contains a NaN. After step PAUSE the main process creates the file LOG.paused and waits until it
is deleted. An existing run is resumed, with the environment's PARALLEL as `parallel`. A TrainingError is printed after
its code.
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
    """Sends SIGTERM to this process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        if row["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class PauseAt(Callback):
    """Pauses the main process after a step, while the others wait for it in a collective operation."""

    def __init__(self, step: int, marker: Path) -> None:
        self.step, self.marker = step, marker

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        if row["step"] == self.step:
            self.marker.touch()
            while self.marker.exists():
                time.sleep(0.001)


def patch_loader(log: Path, nan_position: int) -> None:
    """Log the samples of all training batches, and put a NaN into one of them."""
    make_train_batch = Loader.make_train_batch

    def patched(self: Loader, batch_range: tuple[int, int]) -> Batch:
        batch = make_train_batch(self, batch_range)
        with log.open("a") as file:
            file.writelines(f"{p} {i}\n" for p, i in zip(range(*batch_range), batch.indices, strict=True))
        if batch_range[0] == nan_position:
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    Loader.make_train_batch = patched  # type: ignore[method-assign]


def main(recipe: str, run: str, log: str, stop: str = "-1", nan: str = "-1", pause: str = "-1") -> None:
    patch_loader(Path(log), int(nan))
    callbacks = (StopAt(int(stop)), PauseAt(int(pause), Path(f"{log}.paused")))
    try:
        if Path(run).exists():
            resume(run, callbacks=callbacks, parallel=os.environ.get("PARALLEL"))  # type: ignore[arg-type]
        else:
            train(load_recipe(recipe), run, callbacks=callbacks)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except TrainingError as error:
        print(error.code, error)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
