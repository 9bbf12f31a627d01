"""Several processes compute what one computes: the same samples in the same order, the same losses, one run folder."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from helpers.runs import (
    Nursery,
    assert_exit_codes,
    end_of,
    leftovers,
    rows,
    sha256,
    shared_nursery,
    tiny,
    together,
    write_recipe,
)
from patchword.checkpoints import read_checkpoint
from patchword.config import Config, DataConfig
from patchword.data.resolve import open_data
from patchword.inference.classifier import Classifier
from patchword.training.nan_guard import replay

STEPS = 30


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return shared_nursery()


def configured(**changes: Any) -> Config:
    """Without dropout, whose randomness belongs to a process; shuffled, augmented and mixed."""
    return tiny(model=tiny().model.replace(dropout=0.0, drop_path=0.0), steps=STEPS, save_every=3600.0, **changes)


def samples(log: Path) -> bytes:
    """What all processes wrote down, by position."""
    lines = [line for part in sorted(log.parent.glob(f"{log.name}.*")) for line in part.read_text().splitlines()]
    return "\n".join(sorted(lines, key=lambda line: int(line.split()[0]))).encode()


@pytest.fixture(scope="module")
def alone(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of one process, in the folder "run", with its samples in "log"."""
    folder = tmp_path_factory.mktemp("alone")
    assert_exit_codes(
        together(nursery, 1, write_recipe(folder / "recipe.py", configured()), folder / "run", folder / "log"), 0
    )
    return folder


def check_same_losses(run: Path, other: Path) -> None:
    pairs = list(zip(rows(run), rows(other), strict=True))
    assert len([row for row, _ in pairs if row["kind"] == "train"]) == 12  # the first ten steps, and two
    for ours, theirs in pairs:
        assert (ours["kind"], ours["step"], ours["epoch"]) == (theirs["kind"], theirs["step"], theirs["epoch"])
        name = "loss" if ours["kind"] == "train" else "nll"
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_compute_what_one_does(nursery: Nursery, alone: Path, tmp_path: Path, accumulate: int) -> None:
    recipe = write_recipe(tmp_path / "recipe.py", configured(grad_accum_steps=accumulate))
    assert_exit_codes(together(nursery, 2, recipe, tmp_path / "run", tmp_path / "log"), 0)
    check_same_losses(tmp_path / "run", alone / "run")
    assert samples(tmp_path / "log") == samples(alone / "log")
    ours, theirs = (load_file(folder / "run/model.safetensors") for folder in (tmp_path, alone))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert leftovers(tmp_path / "run") == []


def test_the_number_of_processes_may_change(nursery: Nursery, alone: Path, tmp_path: Path) -> None:
    """One, then two, then one again: stopped by a signal and resumed in between."""
    recipe, run = write_recipe(tmp_path / "recipe.py", configured()), tmp_path / "run"
    for size, stop in ((1, "10"), (2, "20"), (1, "-1")):
        children = together(nursery, size, recipe, run, tmp_path / f"log-{size}-{stop}", stop)
        assert_exit_codes(children, 143 if stop != "-1" else 0)
    parts = [samples(tmp_path / f"log-{name}") for name in ("1-10", "2-20", "1--1")]
    assert [part.count(b"\n") + 1 for part in parts] == [320, 320, 320]  # ten steps each, none made twice
    assert b"\n".join(parts) == samples(alone / "log")
    check_same_losses(run, alone / "run")


def test_one_process_is_exact(nursery: Nursery, alone: Path, tmp_path: Path) -> None:
    """The recorder disturbs nothing: the same run again is the same, bit for bit."""
    recipe = write_recipe(tmp_path / "recipe.py", configured())
    assert_exit_codes(together(nursery, 1, recipe, tmp_path / "run", tmp_path / "log"), 0)
    assert end_of(tmp_path / "run", STEPS) == end_of(alone / "run", STEPS)


def test_a_fault_in_one_share_stops_all(nursery: Nursery, tmp_path: Path) -> None:
    """Step 6, the second process: its batch is named and kept, once; both end."""
    recipe, run = write_recipe(tmp_path / "recipe.py", configured(grad_accum_steps=1)), tmp_path / "run"
    children = together(nursery, 2, recipe, run, tmp_path / "log", "-1", str(5 * 32 + 16))
    assert_exit_codes(children, 2)
    bad = [line.split()[1] for line in samples(tmp_path / "log").decode().splitlines()][5 * 32 + 16 : 6 * 32]
    for child in children:
        assert "Step 6 produced NaN or Inf (input, images) in the batch digits train" in child.output()
    assert [path.name for path in (run / "faults").iterdir()] == ["step-00000005"]
    fault, again = replay(run / "faults/step-00000005")
    assert again == fault.location
    assert len(fault.samples) == len(bad) == 16
    state = {path.name: sha256(path) for path in (run / "checkpoints/step-00000005").iterdir()}
    assert_exit_codes(together(nursery, 2, recipe, run, tmp_path / "log", "-1", str(5 * 32 + 16)), 2)
    assert {path.name: sha256(path) for path in (run / "checkpoints/step-00000005").iterdir()} == state


def test_batch_norm_is_measured_as_it_is_published(nursery: Nursery, tmp_path: Path) -> None:
    """Each process gathers statistics of its own; all must measure with those of the first, which are published."""
    model = configured().model.replace(stem="conv", stem_layers=(8,), patch_size=(2, 2))
    recipe, run = write_recipe(tmp_path / "recipe.py", configured().replace(model=model)), tmp_path / "run"
    assert_exit_codes(together(nursery, 2, recipe, run, tmp_path / "log"), 0)
    test = open_data(DataConfig(source="digits"), 0).test
    assert test is not None
    classifier = Classifier(dataclasses.replace(read_checkpoint(run), temperature=1.0))
    answers = list(classifier.stream(partial(test.read, index) for index in range(len(test))))
    loss = F.cross_entropy(torch.stack(answers), torch.from_numpy(test.targets))  # type: ignore[arg-type]
    (said,) = [row["nll"] for row in rows(run) if row["kind"] == "test"]
    assert float(loss) == pytest.approx(said, abs=1e-4)
