"""Running a study: one run after the other, each once, however often the study is stopped and started again."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..checkpoints import Checkpoint, read_checkpoint
from ..config import Config
from ..core.io import digest as digest_of
from ..core.io import read_json, replace_json
from ..data.resolve import open_data
from ..errors import ConfigError, TrainingError
from ..training import resume, train
from ..training.distributed import ProcessGroup
from ..training.precision import resolve_precision
from ..training.run_dir import is_finished
from ..training.trainer import Trainer
from .study import Cell, Study

PLAN, ROWS, RUNS = "plan.json", "results.json", "runs"
WARM, TIMED = 2, 6  # steps of a trial
START = 8.0  # seconds that a run takes before its first step and after its last
LEAST = 5.0  # seconds a run must have ...
LEAST_STEPS = 30  # ... and steps


def run_study(
    study: Study,
    out: Path,
    budget: float,
    seeds: int = 1,
    say: Callable[[str], object] = lambda text: None,
    now: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """A row for each run. What `out` has already is not run again; a run that was cut off goes on.

    Args:
        budget: seconds for all runs together
        now: the clock, in seconds, that the budget is measured by
    """
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, not {seeds}.")
    check_folder(out)
    plan = make_plan(study, out, budget, seeds, say, now)
    rows = list(read_json(out / ROWS)["rows"]) if (out / ROWS).exists() else []
    for seed in range(seeds):
        for cell in study.cells:
            if not any(row["cell"] == cell.name and row["seed"] == seed for row in rows):
                rows.append(run_cell(study, cell, seed, out, plan, now))
                replace_json(out / ROWS, {"study": study.name, "rows": rows})
                done = f"({len(rows)} of {len(study.cells) * seeds})"
                say(f"{cell.series}, {cell.x}, seed {seed}: {format_accuracy(rows[-1])} {done}")
    return rows


def format_accuracy(row: dict[str, Any]) -> str:
    return "diverged" if row["accuracy"] is None else f"{row['accuracy']:.2%}"


def check_folder(out: Path) -> None:
    """What is not a study is left alone."""
    if out.exists() and not (out / PLAN).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} holds other things than a study. Choose another --out.")


def make_plan(
    study: Study, out: Path, budget: float, seeds: int, say: Callable[[str], object], now: Callable[[], float]
) -> dict[str, Any]:
    """How long every run is; kept in the folder with all settings, so that a study that goes on is the same study."""
    path = out / PLAN
    cells = {cell.name: digest(cell) for cell in study.cells}
    asked = {"study": study.name, "budget": budget, "seeds": seeds, "cells": cells}
    if path.exists():
        plan = read_json(path)
        if other := [key for key, value in asked.items() if plan.get(key) != value]:
            plain = [f"{key} {plan.get(key)}, not {asked[key]}" if key != "cells" else "models" for key in other]
            same = f"{out} holds another study ({'; '.join(plain)})."
            raise ConfigError(f"{same} Go on with the settings it began with, or choose another --out.")
        return plan
    runs, started = seeds * sum(cell.part for cell in study.cells), now()
    least = runs * LEAST / min(cell.part for cell in study.cells)
    if budget < least:
        raise ConfigError(f"{len(study.cells) * seeds} runs need at least {least:.0f} seconds: raise the budget.")
    plan = {**asked, "steps": None}
    if study.equal == "steps":
        say(f"trying {len(models_of(study))} models, to see how many steps the budget allows")
        slowest, evaluation = trials(study, now)
        left = (budget - (now() - started)) / runs - START - evaluation
        plan["steps"] = int(left / slowest)
        if plan["steps"] < LEAST_STEPS:
            needed = runs * (LEAST_STEPS * slowest + START + evaluation) + now() - started
            raise ConfigError(
                f"The budget allows {max(0, plan['steps'])} steps for each of {len(study.cells) * seeds} runs, which "
                f"shows nothing; {LEAST_STEPS} take about {-(-needed // 60):.0f} minutes here."
            )
        say(f"each run makes {plan['steps']} steps; the slowest model takes {slowest:.3f} s for one")
    plan["share"] = (budget - (now() - started)) / runs
    replace_json(path, plan)
    return plan


def models_of(study: Study) -> dict[str, Config]:
    """Each architecture once, with a configuration that has it."""
    return {json.dumps(cell.config.model.to_json()): cell.config for cell in study.cells}


def digest(cell: Cell) -> str:
    return digest_of(json.dumps([cell.config.to_json(), cell.part], sort_keys=True))[:16]


def trials(study: Study, now: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step of the slowest model, and about what its evaluation takes. Each model is tried once."""
    models, world = models_of(study), ProcessGroup()
    parts = open_data(next(iter(models.values())).data.replace(train_fraction=1.0), seed=0)
    slowest = 0.0
    for config in models.values():
        trainer = Trainer(
            config.replace(precision=resolve_precision(config.precision, world.device)), parts, world, fresh=False
        )
        trainer.begin()
        for number in range(WARM + TIMED):
            if number == WARM:
                start = now()
            trainer.advance(0.0)
        slowest = max(slowest, (now() - start) / TIMED)
    batch = study.cells[0].config.batch_size
    pictures = sum(len(part) for part in (parts.val, parts.test) if part is not None)
    return slowest, pictures / batch * slowest / 3  # forward is a third of a step


def run_cell(
    study: Study, cell: Cell, seed: int, out: Path, plan: dict[str, Any], now: Callable[[], float]
) -> dict[str, Any]:
    """The run's row: what came of it, and what it cost."""
    folder = out / RUNS / f"{cell.name}_seed{seed}"
    length: dict[str, Any] = {"budget": plan["share"] * cell.part, "steps": None}
    if plan["steps"]:
        length = {"steps": plan["steps"], "budget": None}
    config = cell.config.replace(name=study.name, seed=seed, **length)
    about = {"cell": cell.name, "series": cell.series, "x": cell.x, "seed": seed}
    started = now()
    try:
        if is_finished(folder):
            pass  # killed between its end and its row
        elif (folder / "config.json").exists():
            resume(folder, started=started, now=now)
        else:
            train(config, folder, started=started, now=now)
    except TrainingError as error:
        if error.code != "not_finite":
            raise
        # Divergence is a result, too, and would be the same again.
        return {**about, "accuracy": None, "diverged": str(error)}
    return {**about, **outcome(read_checkpoint(folder), config)}


def outcome(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    facts = checkpoint.provenance
    part = "test" if "test" in facts["metrics"] else "val"
    figures = facts["metrics"][part]
    images = facts["steps"] * config.batch_size
    return {
        "part": part, "accuracy": figures["top1"], "nll": figures["nll"], "n": figures["n"], "steps": facts["steps"],
        "epochs": facts["epoch"], "seconds": facts["seconds"], "tflop": images * training_flops(checkpoint) / 1e12,
    }  # fmt: skip


def training_flops(checkpoint: Checkpoint) -> float:
    """For one picture: forward, and backward at twice that."""
    config, counter = checkpoint.config, FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernel is not counted
        checkpoint.build_model()(torch.zeros(1, config.in_channels, *config.image_size))
    return 3.0 * counter.get_total_flops()
