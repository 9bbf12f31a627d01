"""Run a study: one training run after the other, each once, however often the study is interrupted."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypedDict, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..checkpoints import Checkpoint, read_checkpoint
from ..config import Config
from ..core.io import digest, read_json, replace_json
from ..data.resolve import open_data
from ..errors import ConfigError, TrainingError
from ..training import resume, train
from ..training.distributed import ProcessGroup
from ..training.precision import resolve_precision
from ..training.run_dir import CONFIG_FILE, is_finished
from ..training.trainer import Trainer
from .study import Cell, Experiment, Length, ResultRow, Study

PLAN_FILE, RESULTS_FILE, RUNS_DIR = "plan.json", "results.json", "runs"
WARMUP_STEPS, TIMED_STEPS = 2, 6  # for measuring how long a step takes
OVERHEAD_SECONDS = 8.0  # of a run, before its first step and after its last
MIN_SECONDS = 5.0  # of a run
FORMER_PLAN_KEYS = {"share": "seconds_per_run"}
FORMER_ROW_KEYS = {"part": "split"}


class Plan(TypedDict):
    """plan.json: the settings of a study, and how long its runs are."""

    study: str
    budget: float
    seeds: int
    cells: dict[str, str]  # name and digest of each cell's configuration
    steps: int | None  # of each run; None: runs have equal time
    seconds_per_run: float


class BudgetTooShortError(ConfigError):
    """Raised when the budget of a study is too short.

    Attributes:
        needed (float): About how many seconds the study takes on this machine.
    """

    code = "budget_too_short"

    def __init__(self, message: str = "", needed: float = 0.0) -> None:
        super().__init__(message)
        self.needed = needed

    @classmethod
    def explain(cls, reason: str, needed: float) -> Self:
        """Make the error for a reason."""
        return cls(f"--budget: {reason}. This machine needs about {format_seconds(needed)}.", needed)


def format_seconds(seconds: float) -> str:
    """Format a duration as it is typed: 90s, 12m."""
    return f"{math.ceil(seconds)}s" if seconds < 120 else f"{math.ceil(seconds / 60)}m"


def run_study(
    study: Study,
    out: Path,
    budget: float,
    seeds: int = 1,
    say: Callable[[str], object] = lambda text: None,
    now: Callable[[], float] = time.monotonic,
) -> list[ResultRow]:
    """Run all cells with all seeds. Finished runs are not repeated, and an interrupted run is resumed.

    Args:
        study: The grid of runs.
        out: The directory of the study.
        budget: Seconds for all runs together.
        seeds: How many runs each cell gets.
        say: Reports progress.
        now: The clock, in seconds, that measures the budget.

    Returns:
        A row for each run.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, not {seeds}.")
    require_study_dir(out)
    plan = make_plan(study, out, budget, seeds, say, now)
    rows = read_results(out)
    for seed in range(seeds):
        for cell in study.cells:
            if not any(row["cell"] == cell.name and row["seed"] == seed for row in rows):
                rows.append(run_cell(study, cell, seed, out, plan, now))
                replace_json(out / RESULTS_FILE, {"study": study.name, "rows": rows})
                count = f"({len(rows)} of {len(study.cells) * seeds})"
                say(f"{cell.series}, {cell.x}, seed {seed}: {format_result(rows[-1])} {count}")
    return rows


def format_result(row: ResultRow) -> str:
    """Format the accuracy of a run as a percentage, the value of a measurement, or "diverged"."""
    if "value" in row:
        return f"{row['value']:.3g}"
    return "diverged" if row["accuracy"] is None else f"{row['accuracy']:.2%}"


def format_row(row: ResultRow) -> str:
    """Format a row for the terminal."""
    return f"{row['series']:24} {row['x']!s:18} seed {row['seed']}  {format_result(row)}"


def require_study_dir(out: Path) -> None:
    """Raise ConfigError if the directory holds anything but a study."""
    if out.exists() and not (out / PLAN_FILE).exists() and not holds_nothing(out, PLAN_FILE):
        raise ConfigError(f"{out} exists and is not a study. Choose another --out.", code="not_a_study")


def holds_nothing(folder: Path, first_file: str) -> bool:
    """Tell whether a directory is empty, except for what a kill leaves while its first file is written."""
    return folder.is_dir() and all(path.name.startswith(f".{first_file}.") for path in folder.iterdir())


def read_results(out: Path) -> list[ResultRow]:
    """Read results.json, also that of earlier versions; no rows if there is none."""
    if not (out / RESULTS_FILE).exists():
        return []
    rows: list[ResultRow] = []
    for row in read_json(out / RESULTS_FILE)["rows"]:
        current: Any = {FORMER_ROW_KEYS.get(key, key): value for key, value in row.items()}
        rows.append(current)
    return rows


def make_plan(
    study: Study, out: Path, budget: float, seeds: int, say: Callable[[str], object], now: Callable[[], float]
) -> Plan:
    """Decide how long each run is, and store that with all settings, so that a resumed study stays the same."""
    cells = {cell.name: cell_digest(cell) for cell in study.cells}
    budget = 0.0 if study.equal == "nothing" else budget
    settings: dict[str, Any] = {"study": study.name, "budget": budget, "seeds": seeds, "cells": cells}
    if (out / PLAN_FILE).exists():
        return read_plan(out, settings)
    num_runs, started = len(study.cells) * seeds, now()
    total_length = seeds * sum(cell.length for cell in study.cells)
    min_budget = total_length * MIN_SECONDS / min(cell.length for cell in study.cells)
    if budget < min_budget and study.equal != "nothing":
        raise BudgetTooShortError.explain(f"{num_runs} runs need more than {format_seconds(budget)}", min_budget)
    steps = None
    if study.equal == "steps":
        say(f"measuring {len(distinct_runs(study))} models to see how many steps the budget allows")
        timings = time_cells(study, now)
        step_seconds = seeds * sum(step for step, _ in timings)
        overhead = seeds * sum(rest for _, rest in timings)
        steps = int((budget - (now() - started) - overhead) / step_seconds)
        if steps < study.min_steps:
            needed = study.min_steps * step_seconds + overhead + now() - started
            raise BudgetTooShortError.explain(
                f"{format_seconds(budget)} allow {max(0, steps)} steps for each of {num_runs} runs, and fewer than "
                f"{study.min_steps} steps are too few to compare",
                needed,
            )
        say(f"each run has {steps} steps; a step of the slowest model takes {max(timings)[0]:.3f} s")
    length: dict[str, Any] = {"steps": steps, "seconds_per_run": (budget - (now() - started)) / total_length}
    plan = cast(Plan, settings | length)
    replace_json(out / PLAN_FILE, plan)
    return plan


def read_plan(out: Path, settings: dict[str, Any]) -> Plan:
    """Read plan.json, and require the same settings."""
    plan: Any = {FORMER_PLAN_KEYS.get(key, key): value for key, value in read_json(out / PLAN_FILE).items()}
    different = [key for key, value in settings.items() if plan.get(key) != value]
    if different:
        parts = ["models" if key == "cells" else describe_difference(key, plan, settings) for key in different]
        raise ConfigError(
            f"{out} holds another study ({'; '.join(parts)}). Use the settings it started with, or choose another "
            "--out.",
            code="study_differs",
        )
    checked: Plan = plan
    return checked


def describe_difference(key: str, plan: dict[str, Any], settings: dict[str, Any]) -> str:
    """Describe a setting of an earlier plan and of this one."""
    saved, given = (format_seconds(each[key]) if key == "budget" else each[key] for each in (plan, settings))
    return f"{key} {saved}, not {given}"


def run_key(cell: Cell) -> str:
    """Return what the speed of a cell depends on: the architecture of an image model, or the whole experiment."""
    config = cell.config
    return json.dumps(config.model.to_json() if isinstance(config, Config) else config.to_json())


def distinct_runs(study: Study) -> dict[str, Config | Experiment]:
    """Return each kind of run once, by its key."""
    return {run_key(cell): cell.config for cell in study.cells}


def cell_digest(cell: Cell) -> str:
    """Return a short digest of a cell's configuration and length."""
    return digest(json.dumps([cell.config.to_json(), cell.length], sort_keys=True))[:16]


def time_cells(study: Study, now: Callable[[], float]) -> list[tuple[float, float]]:
    """Measure every kind of run; return for each cell the seconds of a step, and those that it needs besides steps."""
    timings = {}
    for key, config in distinct_runs(study).items():
        timings[key] = time_model(config, now) if isinstance(config, Config) else config.time_step(now)
    return [timings[run_key(cell)] for cell in study.cells]


def time_model(config: Config, now: Callable[[], float]) -> tuple[float, float]:
    """Measure the training of an image model: seconds of a step, and those that a run needs besides its steps."""
    group = ProcessGroup()
    splits = open_data(config.data.replace(train_fraction=1.0), seed=0)
    config = config.replace(precision=resolve_precision(config.precision, group.device))
    trainer = Trainer(config, splits, group, fresh=False)
    trainer.start_loader()
    for _ in range(WARMUP_STEPS):
        trainer.train_step(0.0)
    start = now()
    for _ in range(TIMED_STEPS):
        trainer.train_step(0.0)
    step_seconds = (now() - start) / TIMED_STEPS
    trainer.close()
    num_images = sum(len(source) for source in (splits.val, splits.test) if source is not None)
    forward_seconds = step_seconds / 3  # the backward pass takes twice as long
    return step_seconds, OVERHEAD_SECONDS + num_images / config.batch_size * forward_seconds


def run_cell(study: Study, cell: Cell, seed: int, out: Path, plan: Plan, now: Callable[[], float]) -> ResultRow:
    """Run one cell, and return its result; a run that diverges is a result, too."""
    seconds = None if plan["steps"] else plan["seconds_per_run"] * cell.length
    length = Length(plan["steps"], seconds)
    row = ResultRow(cell=cell.name, series=cell.series, x=cell.x, seed=seed, accuracy=None)
    try:
        if isinstance(cell.config, Config):
            folder = out / RUNS_DIR / f"{cell.name}_seed{seed}"
            fields = train_cell(cell.config.replace(name=study.name, seed=seed), folder, length, now)
        else:
            fields = cell.config.run(seed, length, now)
    except TrainingError as error:
        if error.code != "not_finite":
            raise
        return {**row, "diverged": str(error)}
    return {**row, **fields}  # type: ignore[typeddict-item]  # fields of it


def train_cell(config: Config, folder: Path, length: Length, now: Callable[[], float]) -> dict[str, Any]:
    """Train an image model, or resume it, and return the fields of its row."""
    config, started = config.replace(steps=length.steps, budget=length.seconds), now()
    if is_finished(folder):
        pass  # killed before its row was written
    elif (folder / CONFIG_FILE).exists():
        resume(folder, started=started, now=now)
    else:
        train(config, folder, started=started, now=now)
    return summarize_run(read_checkpoint(folder), config)


def summarize_run(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """Return the accuracy of a finished run, and what it cost."""
    provenance = checkpoint.provenance
    split = "test" if "test" in provenance["metrics"] else "val"
    metrics = provenance["metrics"][split]
    num_images = provenance["steps"] * config.batch_size
    return {
        "split": split,
        "accuracy": metrics["top1"],
        "nll": metrics["nll"],
        "n": metrics["n"],
        "steps": provenance["steps"],
        "epochs": provenance["epoch"],
        "seconds": provenance["seconds"],
        "tflop": num_images * training_flops(checkpoint) / 1e12,
    }


def training_flops(checkpoint: Checkpoint) -> float:
    """Return the FLOPs of one training image: the forward pass, and twice that for the backward pass."""
    config, counter = checkpoint.config, FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernel is not counted
        checkpoint.build_model()(torch.zeros(1, config.in_channels, *config.image_size))
    return 3.0 * counter.get_total_flops()
