"""`patchword train`: train or fine-tune a model."""

import time
from pathlib import Path
from typing import Annotated, Literal

from ...config import Config
from ...config.overrides import apply_overrides
from ...recipes import is_recipe, load_recipe
from ..arguments import arg, positional
from ..config_flags import CONFIG_VALUES
from ..model_args import JsonFlag
from ..output import print_train_result

START_TIME = time.monotonic()  # a time budget starts with the command, not with the first step
# Datasets with a recipe of their own; on any other data a model is fine-tuned.
DATASET_RECIPES = {"digits": "quickstart", "cifar10": "cifar10_scratch"}


def base_config(what: str) -> Config:
    """Load a recipe by name, or the recipe for the given data."""
    if is_recipe(what):
        return load_recipe(what)
    base = load_recipe(DATASET_RECIPES.get(what, "finetune"))
    name = Path(what).stem or base.name
    return base.replace(name=name, data=base.data.replace(source=what))


def train(
    what: Annotated[str, positional("RECIPE|DATA", "a recipe, a Python file with one, or a dataset")],
    out: Annotated[Path | None, arg("RUN")] = None,
    resume: Annotated[Literal["auto", "never"], arg("auto|never")] = "never",
    json: JsonFlag = False,
) -> int:
    """Train a model: with a recipe, or on your own data.

    Example: patchword train photos/ --budget 10m

    DATA is a folder with one folder per class, a .csv, .parquet or .tar file, or a named dataset (cifar10, ...). The
    recipe "finetune" fine-tunes a pretrained model on it; --model Ti/16 trains from scratch. `patchword recipes` lists
    all recipes.

    Args:
        out: run directory to create; runs/NAME by default
        resume: "auto" resumes the run in that directory, if there is one with the same configuration
    """
    config = apply_overrides(base_config(what), CONFIG_VALUES)
    from ... import training
    from ...training.console import ConsoleCallback
    from ...training.loggers import make_loggers

    callbacks = (ConsoleCallback(), *make_loggers(config))
    result = training.train(config, out, callbacks=callbacks, resume=resume, started=START_TIME)
    return print_train_result(result, json)
