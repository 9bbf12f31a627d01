"""A run that is killed at any time, any number of times, ends bit-identical to an uninterrupted one."""

import random
import re
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
    SINGLE_THREAD_ENV,
    ForkServer,
    final_state,
    leftovers,
    run_with_kills,
    shared_fork_server,
    signal_env,
    start_or_resume,
    tiny_config,
    wait_until,
    write_recipe,
)
from patchword.config import Config, DataConfig, OptimConfig
from patchword.engines.capabilities import Capabilities, probe_capabilities
from patchword.errors import ConfigError
from patchword.training import precision, resume, train

STEPS = 60
KINDS = ["adamw", "muon", "data_parallel", "bf16"]
SEED = random.SystemRandom().randrange(2**32)  # of the steps at which runs are killed; failures print it


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def make_config(kind: str, workers: int = 0) -> Config:
    """Return a configuration: adamw, muon, data_parallel (muon on two cores, without dropout) or bf16 (likewise)."""
    optim = OptimConfig(name="adamw" if kind == "adamw" else "muon", lr=3e-3)
    config = tiny_config(steps=STEPS, optim=optim, data=DataConfig(source="digits", num_workers=workers))
    if kind not in ("data_parallel", "bf16"):
        return config
    config = config.replace(
        num_threads=2, model=config.model.replace(dropout=0.0, attention_dropout=0.0, drop_path=0.0)
    )
    return config.replace(precision="bf16") if kind == "bf16" else config


@pytest.fixture(scope="module")
def references(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The final states of uninterrupted runs, by kind."""
    states = {}
    for kind in KINDS if probe_capabilities().bf16_works else KINDS[:-1]:
        folder = tmp_path_factory.mktemp(kind)
        recipe = write_recipe(folder / "recipe.py", make_config(kind).replace(save_every=3600.0))
        child = start_or_resume(fork_server, recipe, folder / "run")
        assert child.wait() == 0, child.output()
        states[kind] = final_state(folder / "run", STEPS)
    return states


def check_final_state(run: Path, reference: dict[str, Any]) -> None:
    assert final_state(run, STEPS) == reference
    assert leftovers(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_run_resumes_bit_identically(
    fork_server: ForkServer, references: dict[str, dict[str, Any]], tmp_path: Path, kind: str, workers: int
) -> None:
    if kind not in references:
        pytest.skip("this CPU does not support bf16")
    rng = random.Random(f"{SEED} {kind} {workers}")
    points: list[str | int] = ["save", "evaluation", rng.randrange(STEPS // 3), rng.randrange(2 * STEPS // 3)]
    rng.shuffle(points)
    recipe = write_recipe(tmp_path / "recipe.py", make_config(kind, workers))
    kills = run_with_kills(fork_server, recipe, tmp_path / "run", [*points, "finish"])
    assert len(kills) == 5, f"seed {SEED}: {kills}"
    check_final_state(tmp_path / "run", references[kind])


@pytest.mark.slow
def test_run_killed_before_first_checkpoint_resumes(
    fork_server: ForkServer, references: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Also if it is killed between writing config.json and the first step."""
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.py", make_config("adamw").replace(save_every=3600.0))
    for point, has_metrics in (("start", False), ("start", False), (0, True), (5, True)):
        child = start_or_resume(fork_server, recipe, run, **signal_env(point))
        assert child.wait() == -signal.SIGKILL, child.output()
        assert (run / "metrics.jsonl").exists() == has_metrics
        assert (run / "config.json").exists()
        assert not (run / "checkpoints").exists()
    child = fork_server.start("resume", run)
    assert child.wait() == 0, child.output()
    check_final_state(run, references["adamw"])


def test_bf16_run_is_not_resumed_without_bf16_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not probe_capabilities().bf16_works:
        pytest.skip("this CPU does not support bf16")
    train(tiny_config(steps=1, precision="bf16"), tmp_path / "run")
    (tmp_path / "run/model.json").unlink()  # as if the run were unfinished
    monkeypatch.setattr(precision, "probe_capabilities", lambda: Capabilities(bf16_works=False, bf16_speedup=0.0))
    with pytest.raises(ConfigError) as error:
        resume(tmp_path / "run")
    assert error.value.code == "bf16_unsupported"


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_checkpoint_and_exits(
    fork_server: ForkServer, references: dict[str, dict[str, Any]], tmp_path: Path, signum: int, code: int
) -> None:
    rng = random.Random(f"{SEED} {signum}")
    # Only the signal causes a save between two evaluations.
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.py", make_config("muon").replace(save_every=3600.0))
    reached = [0]
    for point in ("evaluation", rng.randrange(STEPS // 2, STEPS - 1)):
        child = start_or_resume(fork_server, recipe, run, **signal_env(point, signum))
        assert child.wait() == code, f"seed {SEED}: {child.output()}"
        reached.append(max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")))
        message = child.output().splitlines()[-1]
        assert re.search(rf"\bstep {reached[-1]}\b.*\bpatchword resume {re.escape(str(run))}$", message)
    assert reached == sorted(set(reached)), "a process did not continue where the last one stopped"
    child = fork_server.start("resume", run)
    assert child.wait() == 0, child.output()
    check_final_state(run, references["muon"])
    again = fork_server.start("resume", run)
    assert again.wait() == 2
    assert again.error_code() == "run_finished"
    assert str(run / "report.html") in again.output()
    assert "Traceback" not in again.output()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_second_signal_exits_without_saving(fork_server: ForkServer, tmp_path: Path, signum: int, code: int) -> None:
    """The process sends itself two signals after step 5 and never completes step 6."""
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.py", make_config("adamw").replace(save_every=3600.0))
    script = tmp_path / "twice.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from helpers.runs import send_signal_at\nfrom patchword.cli.main import main\n"
        f"for _ in range(2):\n    send_signal_at('5', {int(signum)})\nmain(sys.argv[1:])\n"
    )
    child = fork_server.start(script, "train", recipe, "--out", run)
    assert child.wait() == code, child.output()
    assert not (run / "model.json").exists()
    assert not (run / "checkpoints").exists(), "a checkpoint was saved, as after a single signal"


@pytest.mark.slow
def test_killed_command_resumes_bit_identically(
    fork_server: ForkServer, references: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """`python -m patchword` in a new interpreter, not in a child of the fork server."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", make_config("adamw", 2))
    command = [sys.executable, "-m", "patchword", "train", recipe, "--out", str(run)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=SINGLE_THREAD_ENV) as process:
        assert wait_until(lambda: any((run / "checkpoints").glob("step-*")))
        process.kill()
    assert process.returncode in (-signal.SIGKILL, 0)
    if process.returncode:  # otherwise the run finished before the kill
        child = fork_server.start("resume", run)
        assert child.wait() == 0, child.output()
    check_final_state(run, references["adamw"])


def make_image_folder(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for label in ("circle", "cross"):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / label / f"{number}.png")
    return folder


@pytest.mark.parametrize("change", ["added", "removed", "moved"])
def test_resume_refuses_changed_data(fork_server: ForkServer, tmp_path: Path, change: str) -> None:
    photos, run = make_image_folder(tmp_path / "photos"), tmp_path / "run"
    config = tiny_config(data=DataConfig(source=str(photos), num_workers=0), batch_size=4, steps=10_000)
    recipe = write_recipe(tmp_path / "recipe.py", config)
    child = fork_server.start("train", recipe, "--out", run, **signal_env(5, signal.SIGTERM))
    assert child.wait() == 143, child.output()
    before = (run / "metrics.jsonl").read_bytes()
    if change == "added":
        shutil.copy(photos / "cross/1.png", photos / "cross/new.png")
    elif change == "removed":
        (photos / "cross/1.png").unlink()
    else:
        shutil.move(photos / "cross/1.png", photos / "circle/1b.png")
    child = fork_server.start("resume", run)
    assert child.wait() == 2
    assert child.error_code() == "invalid_data"
    assert re.search(r"\bchanged\b.*\btraining set\b", child.output())
    assert "Traceback" not in child.output()
    assert (run / "metrics.jsonl").read_bytes() == before
