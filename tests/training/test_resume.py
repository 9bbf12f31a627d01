"""A run that is killed at any moment, any number of times, ends as if nothing had happened: bit for bit."""

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.runs import (
    ENVIRONMENT,
    Nursery,
    at,
    end_of,
    go_on,
    killed_again_and_again,
    leftovers,
    shared_nursery,
    tiny,
    until,
    write_recipe,
)
from patchword.config import Config, DataConfig, OptimConfig
from patchword.engines.capabilities import Capabilities, probe_capabilities
from patchword.errors import ConfigError
from patchword.training import precision, resume, train

STEPS = 60
KINDS = ["adamw", "muon", "shares", "bf16"]
SEED = random.SystemRandom().randrange(2**32)  # other moments each time; a failure tells the seed


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return shared_nursery()


def configured(kind: str, workers: int = 0) -> Config:
    """adamw, muon, or shares: muon with batches in shares on two cores, which needs a model without dropout; or bf16:
    shares in that precision.
    """
    optim = OptimConfig(name="adamw" if kind == "adamw" else "muon", lr=3e-3)
    config = tiny(steps=STEPS, optim=optim, data=DataConfig(source="digits", num_workers=workers))
    if kind not in ("shares", "bf16"):
        return config
    config = config.replace(num_threads=2, model=config.model.replace(dropout=0.0, drop_path=0.0))
    return config.replace(precision="bf16") if kind == "bf16" else config


@pytest.fixture(scope="module")
def references(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The end of undisturbed runs, by kind."""
    ends = {}
    for kind in KINDS if probe_capabilities().bf16_works else KINDS[:-1]:
        folder = tmp_path_factory.mktemp(kind)
        recipe = write_recipe(folder / "recipe.py", configured(kind).replace(save_every=3600.0))
        child = go_on(nursery, recipe, folder / "run")
        assert child.wait() == 0, child.output()
        ends[kind] = end_of(folder / "run", STEPS)
    return ends


def check_end(run: Path, reference: dict[str, Any]) -> None:
    assert end_of(run, STEPS) == reference
    assert leftovers(run) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_kills_leave_no_trace(
    nursery: Nursery, references: dict[str, dict[str, Any]], tmp_path: Path, kind: str, workers: int
) -> None:
    if kind not in references:
        pytest.skip("this processor cannot compute in bf16")
    chance = random.Random(f"{SEED} {kind} {workers}")
    moments: list[str | int] = ["save", "evaluation", chance.randrange(STEPS // 3), chance.randrange(2 * STEPS // 3)]
    chance.shuffle(moments)
    recipe = write_recipe(tmp_path / "recipe.py", configured(kind, workers))
    kills = killed_again_and_again(nursery, recipe, tmp_path / "run", [*moments, "finish"])
    assert len(kills) == 5, f"seed {SEED}: {kills}"
    check_end(tmp_path / "run", references[kind])


def test_a_kill_before_the_first_step(nursery: Nursery, references: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Between config.json and the first step, and before the first checkpoint."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", configured("adamw").replace(save_every=3600.0))
    for moment, metrics in (("start", False), ("start", False), (0, True), (5, True)):
        child = go_on(nursery, recipe, run, **at(moment))
        assert child.wait() == -signal.SIGKILL, child.output()
        assert (run / "metrics.jsonl").exists() == metrics
        assert (run / "config.json").exists()
        assert not (run / "checkpoints").exists()
    child = nursery.run("resume", run)
    assert child.wait() == 0, child.output()
    check_end(run, references["adamw"])


def test_a_run_in_bf16_is_not_resumed_where_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not probe_capabilities().bf16_works:
        pytest.skip("this processor cannot compute in bf16")
    train(tiny(steps=1, precision="bf16"), tmp_path / "run")
    (tmp_path / "run/model.json").unlink()  # as if it had not come to its end
    monkeypatch.setattr(precision, "probe_capabilities", lambda: Capabilities(bf16_works=False, bf16_speedup=0.0))
    with pytest.raises(ConfigError) as error:
        resume(tmp_path / "run")
    assert error.value.code == "bf16_unsupported"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(
    nursery: Nursery, references: dict[str, dict[str, Any]], tmp_path: Path, number: int, code: int
) -> None:
    chance = random.Random(f"{SEED} {number}")
    # Without the signal nothing would be saved between two evaluations.
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", configured("muon").replace(save_every=3600.0))
    reached = [0]
    for moment in ("evaluation", chance.randrange(STEPS // 2, STEPS - 1)):
        child = go_on(nursery, recipe, run, **at(moment, number))
        assert child.wait() == code, f"seed {SEED}: {child.output()}"
        assert f"patchword resume {run}" in child.output()
        reached.append(max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")))
        assert f"stopped at step {reached[-1]};" in child.output()
    assert reached == sorted(set(reached)), "each process went on from where the last one stopped"
    child = nursery.run("resume", run)
    assert child.wait() == 0, child.output()
    check_end(run, references["muon"])
    again = nursery.run("resume", run)
    assert again.wait() == 2
    assert f"{run} is finished" in again.output()
    assert "report.html" in again.output()
    assert "Traceback" not in again.output()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_second_signal_ends_a_run_at_once(nursery: Nursery, tmp_path: Path, number: int, code: int) -> None:
    """The process sends itself a signal at the start of each step from the fifth on, and never reaches the sixth."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", configured("adamw").replace(save_every=3600.0))
    script = tmp_path / "twice.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from helpers.runs import signal_at\nfrom patchword.cli.main import main\n"
        f"for _ in range(2):\n    signal_at('5', {int(number)})\nmain(sys.argv[1:])\n"
    )
    child = nursery.run(script, "train", recipe, "--out", run)
    assert child.wait() == code, child.output()
    assert not (run / "model.json").exists()
    assert not (run / "checkpoints").exists(), "the first signal alone would have saved step 5"


def test_the_command_itself(nursery: Nursery, references: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Not a child of the nursery but python -m patchword, which starts afresh, and is killed likewise."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", configured("adamw", 2))
    command = [sys.executable, "-m", "patchword", "train", recipe, "--out", str(run)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        assert until(lambda: any((run / "checkpoints").glob("step-*")))
        process.kill()
    assert process.returncode in (-signal.SIGKILL, 0)
    if process.returncode:  # else this process was so late that the run had come to its end
        child = nursery.run("resume", run)
        assert child.wait() == 0, child.output()
    check_end(run, references["adamw"])


def picture_folder(folder: Path) -> Path:
    noise = np.random.default_rng(0)
    for label in ("circle", "cross"):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(noise.integers(0, 256, (8, 8), np.uint8)).save(folder / label / f"{number}.png")
    return folder


@pytest.mark.parametrize("change", ["added", "removed", "moved"])
def test_changed_data_are_refused(nursery: Nursery, tmp_path: Path, change: str) -> None:
    photos, run = picture_folder(tmp_path / "photos"), tmp_path / "run"
    config = tiny(data=DataConfig(source=str(photos), num_workers=0), batch_size=4, steps=10_000)
    child = nursery.run("train", write_recipe(tmp_path / "recipe.py", config), "--out", run, **at(5, signal.SIGTERM))
    assert child.wait() == 143, child.output()
    before = (run / "metrics.jsonl").read_bytes()
    if change == "added":
        shutil.copy(photos / "cross/1.png", photos / "cross/new.png")
    elif change == "removed":
        (photos / "cross/1.png").unlink()
    else:
        shutil.move(photos / "cross/1.png", photos / "circle/1b.png")
    child = nursery.run("resume", run)
    assert child.wait() == 2
    assert "The data have changed since the run" in child.output()
    assert "Traceback" not in child.output()
    assert (run / "metrics.jsonl").read_bytes() == before, "a refused resumption leaves the run as it was"
