"""`patchword resume`: continue a training run."""

from pathlib import Path
from typing import Annotated

from ..arguments import positional
from ..model_args import JsonFlag
from ..output import print_train_result
from . import train_command


def resume(run: Annotated[Path, positional("RUN")], json: JsonFlag = False) -> int:
    """Resume a training run that was stopped or killed, from its last checkpoint.

    Example: patchword resume runs/photos

    A run whose length is set by --epochs or --steps ends bit-identical to an uninterrupted one.

    Args:
        run: run directory, e.g. runs/photos
    """
    from ... import training
    from ...training.console import ConsoleCallback
    from ...training.loggers import make_loggers
    from ...training.run_dir import read_config

    callbacks = (ConsoleCallback(), *make_loggers(read_config(run)))
    return print_train_result(training.resume(run, callbacks=callbacks, started=train_command.START_TIME), json)
