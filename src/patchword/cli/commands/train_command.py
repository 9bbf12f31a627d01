"""The commands that make a model: quickstart, train, resume; and doctor, which says what is in the way."""

import time
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from ...config import Config
from ...config.overrides import apply_overrides
from ...errors import ConfigError
from ...recipes import is_recipe, load_recipe
from ..config_flags import CONFIG_VALUES
from ..model_args import Flag, arg
from ..output import print_train_result

STARTED = time.monotonic()  # a budget begins with the command, not with the first step
# Sets that have a recipe of their own; any other data are fine-tuned on.
RECIPE_OF = {"digits": "quickstart", "cifar10": "cifar10_scratch"}


def base_config(what: str) -> Config:
    """The recipe that is named, or the one for the data that are named."""
    if is_recipe(what):
        return load_recipe(what)
    base = load_recipe(RECIPE_OF.get(what, "finetune"))
    name = Path(what).stem or base.name
    return base.replace(name=name, data=base.data.replace(source=what))


def train(
    what: Annotated[Positional[str], arg("RECIPE|DATA", "a recipe, a Python file with one, or the data themselves")],
    out: Annotated[Path | None, arg("RUN")] = None,
    resume: Annotated[Literal["auto", "never"], arg("{auto,never}")] = "never",
    json: Flag = False,
) -> int:
    """Train a model: by a recipe, or on your own data.

    Example: patchword train photos/ --budget 10m

    DATA is a folder with a folder for each class, a .csv, .parquet or .tar file, or a named set (cifar10, ...). A model
    is fine-tuned on it by the recipe "finetune", or trained from nothing with --model Ti/16. Any field of the
    configuration is a flag: --init MODEL, --budget 10m, --epochs 5, --model S/16, --augment medium, --optim.lr 3e-4,
    --data.num-workers 4 (docs/train.md lists them).

    Args:
        out: the run folder to make; runs/NAME if not given
        resume: auto resumes the run in the folder, if it holds one of the same configuration
        json: one JSON document on standard output, nothing else
    """
    config = apply_overrides(base_config(what), CONFIG_VALUES)
    from ... import training
    from ...training.console import ConsoleCallback
    from ...training.loggers import make_loggers

    watchers = (ConsoleCallback(), *make_loggers(config))
    return print_train_result(training.train(config, out, watchers=watchers, resume=resume, started=STARTED), json)


def resume(run: Annotated[Positional[Path], arg("RUN")], json: Flag = False) -> int:
    """Go on with a run that was stopped or killed: it ends as if nothing had happened.

    Example: patchword resume runs/cifar10-scratch

    Args:
        run: a run folder
        json: one JSON document on standard output, nothing else
    """
    from ... import training
    from ...training.console import ConsoleCallback
    from ...training.loggers import make_loggers
    from ...training.run_dir import read_config

    watchers = (ConsoleCallback(), *make_loggers(read_config(run)))
    return print_train_result(training.resume(run, watchers=watchers, started=STARTED), json)


def quickstart(out: Annotated[Path | None, arg("RUN")] = None) -> int:
    """Train, evaluate and show a small ViT on handwritten digits, in about a minute.

    Example: patchword quickstart

    Args:
        out: the run folder to make; runs/digits if not given
    """
    from .quickstart_command import quickstart as story

    return story(out, STARTED)


def doctor(
    what: Annotated[Positional[str | None], arg("[DATA|RUN]")] = None,
    image_size: int = 224,
    patch_size: int = 16,
    json: Flag = False,
) -> int:
    """Say what this machine can do, and what is wrong with data or with a run that stopped.

    Example: patchword doctor photos/ --image-size 224 --patch-size 16

    Args:
        what: data as `train` takes them, or a run folder; without it, this machine
        image_size: that the model will have
        patch_size: that the model will have
        json: one JSON document on standard output, nothing else
    """
    if min(image_size, patch_size) < 1:
        raise ConfigError("--image-size and --patch-size must be at least 1.")
    from .doctor_command import consult

    return consult(what, (image_size, image_size), (patch_size, patch_size), json)
