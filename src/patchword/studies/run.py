"""Running a study: one run after the other, each once, however often the study is stopped and started again."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..checkpoints import Checkpoint, read_checkpoint
from ..checkpoints.files import atomic_output
from ..config import Config
from ..errors import ConfigError
from ..training import resume, train
from ..training.folder import is_finished
from .study import Cell, Study

PLAN, ROWS, RUNS = "plan.json", "results.json", "runs"
TRIAL_STEPS = 12
SPARE = 0.85  # of the time goes into steps, where their number is laid down; the rest starts and measures
LEAST = 5.0  # seconds a run must have


def run_study(
    study: Study, out: Path, budget: float, seeds: int = 1, say: Callable[[str], object] = lambda text: None
) -> list[dict[str, Any]]:
    """A row for each run. What `out` has already is not run again; a run that was cut off goes on.

    Args:
        budget: seconds for all runs together
    """
    share = budget / (len(study.cells) * seeds)
    if share < LEAST:
        raise ConfigError(
            f"{len(study.cells) * seeds} runs need at least {LEAST:g} seconds each; give a larger budget."
        )
    plan = make_plan(study, out, share, seeds, say)
    rows = read_rows(out)
    for seed in range(seeds):
        for cell in study.cells:
            if not any(row["cell"] == cell.name and row["seed"] == seed for row in rows):
                rows.append(run_cell(study, cell, seed, out, plan))
                write_json(out / ROWS, {"study": study.name, "rows": rows})
                found = f"{rows[-1]['accuracy']:.2%} ({len(rows)} of {len(study.cells) * seeds})"
                say(f"{cell.series}, {cell.x}, seed {seed}: {found}")
    return rows


def make_plan(study: Study, out: Path, share: float, seeds: int, say: Callable[[str], object]) -> dict[str, Any]:
    """How long every run is; kept in the folder, so that it does not change when the study goes on."""
    path = out / PLAN
    asked = {"study": study.name, "cells": [cell.name for cell in study.cells], "seeds": seeds}
    if path.exists():
        plan: dict[str, Any] = json.loads(path.read_text())
        if {key: plan.get(key) for key in asked} != asked:
            raise ConfigError(f"{out} holds another study, or the same with other runs. Choose another folder.")
        return plan
    plan = {**asked, "share": share, "steps": None}
    if study.equal == "steps":
        slowest = max(seconds_per_step(cell.config, out / RUNS / "trial") for cell in study.cells)
        plan["steps"] = max(1, int(SPARE * share / slowest))
        say(f"each run makes {plan['steps']} steps; the slowest model takes {slowest:.2f} s for one")
    write_json(path, plan)
    return plan


def seconds_per_step(config: Config, folder: Path) -> float:
    """Measured, in a short run that is thrown away."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        train(config.replace(steps=TRIAL_STEPS, budget=None), folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        speeds = sorted(row["images_per_second"] for row in rows if row["kind"] == "train")
        return float(config.batch_size / speeds[len(speeds) // 2])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_cell(study: Study, cell: Cell, seed: int, out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The run's row: what came of it, and what it cost."""
    folder = out / RUNS / f"{cell.name}_seed{seed}"
    part = float(cell.x) if study.name == "compute" else 1.0  # of the share that the cell gets
    length: dict[str, Any] = {"budget": plan["share"] * part, "steps": None}
    if plan["steps"]:
        length = {"steps": plan["steps"], "budget": None}
    config = replace(cell.config, name=study.name, seed=seed, **length)
    if is_finished(folder):  # killed between its end and its row
        return row_of(cell, seed, folder, config)
    started = time.monotonic()
    if (folder / "config.json").exists():
        resume(folder, started=started)
    else:
        train(config, folder, started=started)
    return row_of(cell, seed, folder, config)


def row_of(cell: Cell, seed: int, folder: Path, config: Config) -> dict[str, Any]:
    checkpoint = read_checkpoint(folder)
    facts = checkpoint.provenance
    part = "test" if "test" in facts["metrics"] else "val"
    figures = facts["metrics"][part]
    images = facts["steps"] * config.batch_size
    return {
        "cell": cell.name, "series": cell.series, "x": cell.x, "seed": seed, "part": part,
        "accuracy": figures["top1"], "nll": figures["nll"], "n": figures["n"], "steps": facts["steps"],
        "epochs": facts["epoch"], "seconds": facts["seconds"], "tflop": images * training_flops(checkpoint) / 1e12,
    }  # fmt: skip


def training_flops(checkpoint: Checkpoint) -> float:
    """For one picture: forward, and backward at twice that."""
    config, counter = checkpoint.config, FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernel is not counted
        checkpoint.model()(torch.zeros(1, config.in_channels, *config.image_size))
    return 3.0 * counter.get_total_flops()


def read_rows(out: Path) -> list[dict[str, Any]]:
    path = out / ROWS
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_output(path, overwrite=True) as made:
        made.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
