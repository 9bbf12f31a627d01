"""Several processes train like one: the same samples in the same order, the same losses, one run directory."""

import dataclasses
import operator
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from helpers.runs import (
    ForkServer,
    assert_exit_codes,
    final_state,
    leftovers,
    rows,
    sha256,
    shared_fork_server,
    start_ranks,
    tiny_config,
    write_recipe,
)
from patchword.checkpoints import read_checkpoint
from patchword.config import Config, DataConfig
from patchword.data.resolve import open_data
from patchword.inference.classifier import Classifier
from patchword.training.nan_guard import replay

STEPS = 30


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def make_config(**changes: Any) -> Config:
    """Without dropout, whose random numbers differ between processes; with shuffling, augmentation and mixup."""
    return tiny_config(
        model=tiny_config().model.replace(dropout=0.0, attention_dropout=0.0, drop_path=0.0),
        steps=STEPS,
        save_every=3600.0,
        **changes,
    )


def read_samples(log: Path) -> bytes:
    """Return the logged samples of all processes, by position."""
    lines = [line for path in sorted(log.parent.glob(f"{log.name}.*")) for line in path.read_text().splitlines()]
    return "\n".join(sorted(lines, key=lambda line: int(line.split()[0]))).encode()


@pytest.fixture(scope="module")
def single_process(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an uninterrupted run of one process, "run", and its samples, "log"."""
    folder = tmp_path_factory.mktemp("single_process")
    recipe = write_recipe(folder / "recipe.py", make_config())
    assert_exit_codes(start_ranks(fork_server, 1, recipe, folder / "run", folder / "log"), 0)
    return folder


def check_same_losses(run: Path, other: Path) -> None:
    pairs = list(zip(rows(run), rows(other), strict=True))
    assert len([row for row, _ in pairs if row["kind"] == "train"]) == 12  # steps 1 to 10, 20 and 30
    position = operator.itemgetter("kind", "step", "epoch")
    for actual, expected in pairs:
        assert position(actual) == position(expected)
        name = "loss" if actual["kind"] == "train" else "nll"
        assert actual[name] == pytest.approx(expected[name], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("grad_accum_steps", [1, 2])
def test_two_processes_match_one(
    fork_server: ForkServer, single_process: Path, tmp_path: Path, grad_accum_steps: int
) -> None:
    recipe = write_recipe(tmp_path / "recipe.py", make_config(grad_accum_steps=grad_accum_steps))
    assert_exit_codes(start_ranks(fork_server, 2, recipe, tmp_path / "run", tmp_path / "log"), 0)
    check_same_losses(tmp_path / "run", single_process / "run")
    assert read_samples(tmp_path / "log") == read_samples(single_process / "log")
    actual, expected = (load_file(folder / "run/model.safetensors") for folder in (tmp_path, single_process))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)
    assert leftovers(tmp_path / "run") == []


def test_resume_with_different_number_of_processes(
    fork_server: ForkServer, single_process: Path, tmp_path: Path
) -> None:
    """One process, then two, then one again; in between, a signal stops the run."""
    recipe, run = write_recipe(tmp_path / "recipe.py", make_config()), tmp_path / "run"
    for world_size, stop in ((1, "10"), (2, "20"), (1, "-1")):
        log = tmp_path / f"log-{world_size}-{stop}"
        children = start_ranks(fork_server, world_size, recipe, run, log, stop)
        assert_exit_codes(children, 143 if stop != "-1" else 0)
    samples = [read_samples(tmp_path / f"log-{name}") for name in ("1-10", "2-20", "1--1")]
    assert [lines.count(b"\n") + 1 for lines in samples] == [320, 320, 320]  # ten steps each, none repeated
    assert b"\n".join(samples) == read_samples(single_process / "log")
    check_same_losses(run, single_process / "run")


def test_single_process_is_deterministic(fork_server: ForkServer, single_process: Path, tmp_path: Path) -> None:
    """The same run twice is bit-identical, so the comparisons above are valid."""
    recipe = write_recipe(tmp_path / "recipe.py", make_config())
    assert_exit_codes(start_ranks(fork_server, 1, recipe, tmp_path / "run", tmp_path / "log"), 0)
    assert final_state(tmp_path / "run", STEPS) == final_state(single_process / "run", STEPS)


def test_nan_in_one_process_stops_all(fork_server: ForkServer, tmp_path: Path) -> None:
    """The second process meets a NaN in step 6: its batch is named and saved, once, and both processes end."""
    recipe, run = write_recipe(tmp_path / "recipe.py", make_config(grad_accum_steps=1)), tmp_path / "run"
    children = start_ranks(fork_server, 2, recipe, run, tmp_path / "log", "-1", str(5 * 32 + 16))
    assert_exit_codes(children, 2)
    indices = [line.split()[1] for line in read_samples(tmp_path / "log").decode().splitlines()]
    for child in children:
        assert re.search(r"^not_finite\b.*\bStep 6\b.*\(input, images\).*\bdigits train\b", child.output(), re.M)
    assert [path.name for path in (run / "faults").iterdir()] == ["step-00000005"]
    fault, replayed_location = replay(run / "faults/step-00000005")
    assert replayed_location == fault.location
    train_set = open_data(make_config().data, seed=make_config().seed).train
    assert fault.samples == [train_set.name(int(index)) for index in indices[5 * 32 + 16 : 6 * 32]]
    checksums = {path.name: sha256(path) for path in (run / "checkpoints/step-00000005").iterdir()}
    assert_exit_codes(start_ranks(fork_server, 2, recipe, run, tmp_path / "log", "-1", str(5 * 32 + 16)), 2)
    assert {path.name: sha256(path) for path in (run / "checkpoints/step-00000005").iterdir()} == checksums


def test_evaluation_uses_batch_norm_statistics_of_published_model(fork_server: ForkServer, tmp_path: Path) -> None:
    """Each process has its own statistics; all evaluate with those of the main process, which are published."""
    model = make_config().model.replace(stem="conv", stem_layers=(8,), patch_size=(2, 2))
    recipe, run = write_recipe(tmp_path / "recipe.py", make_config().replace(model=model)), tmp_path / "run"
    assert_exit_codes(start_ranks(fork_server, 2, recipe, run, tmp_path / "log"), 0)
    test_set = open_data(DataConfig(source="digits"), 0).test
    assert test_set is not None
    classifier = Classifier(dataclasses.replace(read_checkpoint(run), temperature=1.0))
    logits = list(classifier.stream(partial(test_set.read, index) for index in range(len(test_set))))
    loss = F.cross_entropy(torch.stack(logits), torch.from_numpy(test_set.targets))  # type: ignore[arg-type]
    (reported,) = [row["nll"] for row in rows(run) if row["kind"] == "test"]
    assert float(loss) == pytest.approx(reported, abs=1e-4)
