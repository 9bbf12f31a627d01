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


def recipe_for(what: str) -> str:
    """Return the name of a recipe as it is, or that of the recipe for the given data."""
    return what if is_recipe(what) else DATASET_RECIPES.get(what, "finetune")


def base_config(what: str) -> Config:
    """Load a recipe by name, or the recipe for the given data."""
    base = load_recipe(recipe_for(what))
    if is_recipe(what):
        return base
    name = Path(what).stem or base.name
    return base.replace(name=name, data=base.data.replace(source=what))


def train(
    what: Annotated[str, positional("RECIPE|DATA", "a recipe, a Python file that sets config, or a dataset")],
    out: Annotated[Path | None, arg("RUN")] = None,
    resume: Annotated[Literal["auto", "never"], arg("auto|never")] = "never",
    json: JsonFlag = False,
) -> int:
    """Train or fine-tune a model, on your own data or with a recipe.

    Example: patchword train photos/ --budget 10m

    DATA is a folder with one subfolder per class, a .csv, .tsv, .parquet or .tar file, hf-datasets:OWNER/NAME, or a
    named dataset: pets, flowers102, cifar100, mnist, ... The recipe finetune fine-tunes a pretrained ViT-Ti/16 on it.
    To train from scratch, add --model Ti/16. The datasets digits and cifar10 have recipes of their own.

    RECIPE is a built-in recipe (patchword recipes lists them), or your own file, such as my_recipe.py.

    Args:
        out: run directory to create; by default, runs/NAME, with the name of the data or the recipe
        resume: "auto" resumes the run in that directory if it has the same configuration; "never" starts a new run
    """
    config = apply_overrides(base_config(what), CONFIG_VALUES)
    from ... import training
    from ...training.console import ConsoleCallback
    from ...training.loggers import make_loggers

    callbacks = (ConsoleCallback(), *make_loggers(config))
    result = training.train(config, out, callbacks=callbacks, resume=resume, started=START_TIME)
    return print_train_result(result, json)
