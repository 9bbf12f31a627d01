"""Runs of several processes resume bit-identically after a kill of all processes or of one."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import (
    SINGLE_THREAD_ENV,
    TIMEOUT,
    ForkServer,
    assert_exit_codes,
    final_state,
    leftovers,
    rows,
    shared_fork_server,
    signal_env,
    start_ranks,
    tiny_config,
    wait_until,
    write_recipe,
)
from patchword.config import Config, DataConfig, DistillConfig, OptimConfig
from patchword.errors import ConfigError
from patchword.training import resume, train

STEPS = 20
AVERAGED_GRADIENTS = Path(__file__).parents[1] / "helpers/averaged_gradients.py"
RESUMED_STEP = re.compile(r"\bresumed[^\d\n]+\d+")  # in the console output


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def make_config(**changes: Any) -> Config:
    """The batch size is divisible by 2, 3 and 4 processes and two micro-batches; every fourth step is evaluated."""
    base: dict[str, Any] = {
        "model": tiny_config().model.replace(dropout=0.0, attention_dropout=0.0, drop_path=0.0),
        "num_threads": 1,
    }
    base |= {"steps": STEPS, "batch_size": 48, "eval_every": 0.15, "save_every": 3600.0}
    return tiny_config(**{**base, **changes})


def make_lora_config(teacher: str) -> Config:
    """LoRA, SAM (two gradients per step), gradient clipping, and a distillation head."""
    model = make_config().model.replace(distillation=True, class_token=True, pooling="class")
    distill = DistillConfig(teacher=teacher, kind="soft")
    return make_config(
        model=model, lora_rank=2, optim=OptimConfig(lr=3e-3, sam_rho=0.05, clip_grad_norm=1.0), distill=distill
    )


UninterruptedRun = Callable[[int, str], Path]


@pytest.fixture(scope="module")
def uninterrupted_run(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> UninterruptedRun:
    """Function that returns the run of a number of processes and a kind of configuration; trained once."""
    runs: dict[tuple[int, str], Path] = {}

    def run(world_size: int, kind: str) -> Path:
        if (world_size, kind) not in runs:
            folder = tmp_path_factory.mktemp(f"{kind}{world_size}")
            config = make_config() if kind == "plain" else make_lora_config(str(run(1, "plain")))
            recipe = write_recipe(folder / "recipe.py", config)
            assert_exit_codes(start_ranks(fork_server, world_size, recipe, folder / "run", folder / "log"), 0)
            runs[world_size, kind] = folder / "run"
        return runs[world_size, kind]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "lora")])
def test_losses_match_single_process(uninterrupted_run: UninterruptedRun, world_size: int, kind: str) -> None:
    pairs = list(zip(rows(uninterrupted_run(world_size, kind)), rows(uninterrupted_run(1, kind)), strict=True))
    assert len(pairs) > STEPS // 2
    for actual, expected in pairs:
        name = "loss" if actual["kind"] == "train" else "nll"
        assert actual["step"] == expected["step"]
        assert actual[name] == pytest.approx(expected[name], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "lora")])
def test_killed_run_resumes_bit_identically(
    fork_server: ForkServer, uninterrupted_run: UninterruptedRun, tmp_path: Path, world_size: int, kind: str
) -> None:
    """All processes are killed at step 9; after resuming, only the last one at step 14.

    Then the others exit with an error. Rarely, Gloo leaves them waiting for the dead one; torchrun would kill them.
    """
    reference, run = uninterrupted_run(world_size, kind), tmp_path / "run"
    recipe = reference.with_name("recipe.py")
    for step, log in ((9, tmp_path / "first"), (14, tmp_path / "second")):
        children = start_ranks(fork_server, world_size, recipe, run, log, "-1", "-1", str(step))
        pause_marker = Path(f"{log}.0.paused")
        assert wait_until(pause_marker.exists)
        assert any((run / "checkpoints").glob("step-*"))
        if step == 9:
            for child in children:
                child.send_signal(signal.SIGKILL)
            assert_exit_codes(children, -signal.SIGKILL)
        else:
            assert children[-1].kill() == -signal.SIGKILL
            pause_marker.unlink()
            survivors = children[:-1]
            wait_until(lambda survivors=survivors: all(child.has_exited() for child in survivors), 60)
            assert {child.kill() for child in survivors} <= {1, -signal.SIGKILL}
    assert_exit_codes(start_ranks(fork_server, world_size, recipe, run, tmp_path / "log"), 0)
    assert final_state(run, STEPS) == final_state(reference, STEPS)
    assert leftovers(run) == []


KILL_AT_STEP_14 = """
import os, signal
from patchword.training.trainer import Trainer

if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    train_step = Trainer.train_step

    def patched(self, progress):
        if self.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, progress)

    Trainer.train_step = patched
"""


@pytest.mark.slow
def test_torchrun_restart_resumes_bit_identically(uninterrupted_run: UninterruptedRun, tmp_path: Path) -> None:
    """The recipe kills rank 1 before step 15 of the first attempt."""
    reference, recipe = uninterrupted_run(2, "plain"), tmp_path / "recipe.py"
    recipe.write_text(reference.with_name("recipe.py").read_text() + KILL_AT_STEP_14)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *torchrun, "-m", "patchword", "train", str(recipe), "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=SINGLE_THREAD_ENV, **pipes) as process:
        timeout = threading.Timer(2 * TIMEOUT, process.terminate)  # ends the workers, too, unlike a kill
        timeout.start()
        stdout, stderr = process.communicate()
        timeout.cancel()
    assert process.returncode == 0, stderr
    assert stderr.count("exitcode: -9") == 1 and RESUMED_STEP.search(stderr), stderr
    assert final_state(tmp_path / "runs/tiny", STEPS) == final_state(reference, STEPS)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    assert json.loads(stdout)["steps"] == STEPS


def test_gradients_are_averaged_over_processes(fork_server: ForkServer) -> None:
    """In buckets of a fixed order; a parameter without a gradient in any process stays without one."""
    assert_exit_codes(start_ranks(fork_server, 3, script=AVERAGED_GRADIENTS), 0)


def test_resume_auto_starts_resumes_and_detects_finished_run(
    fork_server: ForkServer, uninterrupted_run: UninterruptedRun, tmp_path: Path
) -> None:
    """The same command is run three times."""
    run, reference = tmp_path / "run", uninterrupted_run(1, "plain")
    recipe = reference.with_name("recipe.py")
    command = ("train", recipe, "--out", run, "--resume", "auto")
    child = fork_server.start(*command, **signal_env(STEPS // 2, signal.SIGTERM))
    assert child.wait() == 143, child.output()
    resumed = fork_server.start(*command)
    assert resumed.wait() == 0 and RESUMED_STEP.search(resumed.output()), resumed.output()
    assert final_state(run, STEPS) == final_state(reference, STEPS)
    mtimes = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    finished = fork_server.start(*command, "--json")
    assert finished.wait() == 0, finished.output()
    result = json.loads(finished.output()[finished.output().index("{") :])  # the log also has standard error
    assert len(result["notes"]) == 1
    assert str(run / "report.html") in result["notes"][0]
    assert result["steps"] == STEPS
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == mtimes


def test_resume_auto_refuses_different_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(steps=1)
    train(config, "named", resume="auto")
    before = Path("named/metrics.jsonl").read_bytes()
    other = config.replace(steps=2, optim=OptimConfig(lr=0.5))
    with pytest.raises(ConfigError) as error:
        train(other, "named", resume="auto")
    assert error.value.code == "run_differs"
    assert re.search(r"\boptim\.lr\b\D+0\.003\D+0\.5\D+\bsteps\D+1\D+2\b", str(error.value))
    assert Path("named/metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError) as error:
        train(config, "named")
    assert error.value.code == "run_exists"
    with pytest.raises(ConfigError, match=r"\bresume\b.*'always'.*'auto'.*'never'"):
        train(config, "named", resume="always")  # type: ignore[arg-type]


def test_resume_auto_without_directory_resumes_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of runs/tiny, runs/tiny-2, ... if it has the same configuration; otherwise a new run is started."""
    monkeypatch.chdir(tmp_path)
    config = make_config(steps=1)
    other = config.replace(seed=1)
    results = [train(given, resume="auto") for given in (config, config, other, other, config)]
    folders = ["tiny", "tiny", "tiny-2", "tiny-2", "tiny-3"]
    assert [result.run_dir for result in results if result] == [Path("runs") / name for name in folders]
    first, second, *_ = results
    assert first
    assert second
    assert (first.metrics, first.steps) == (second.metrics, second.steps)
    assert second.notes[-1].code == "finished"


def test_resume_auto_accepts_resolved_precision(tmp_path: Path) -> None:
    """A run resolves precision="auto" when it starts; the same configuration still matches."""
    config = make_config(steps=1, precision="auto", data=DataConfig(source="digits", num_workers=0))
    for _ in range(2):
        result = train(config, tmp_path / "run", resume="auto")
    assert result
    assert result.notes[-1].code == "finished"


def test_existing_directory_ends_all_processes_with_same_error(fork_server: ForkServer, tmp_path: Path) -> None:
    """Only the main process creates the run directory, but no process may end with a connection error."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/other.txt").touch()
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom patchword.errors import ConfigError\nfrom patchword.recipes import load_recipe\n"
        "from patchword.training import train\n"
        "try:\n    train(load_recipe(sys.argv[1]), sys.argv[2])\n"
        "except ConfigError as error:\n    print(error.code)\n    sys.exit(2)\n"
    )
    recipe = write_recipe(tmp_path / "recipe.py", make_config())
    children = start_ranks(fork_server, 2, recipe, tmp_path / "run", script=script)
    assert_exit_codes(children, 2)
    assert [child.output().split()[-1] for child in children] == ["run_exists", "run_exists"]


def test_resume_of_finished_run_succeeds_after_torchrun_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart of `patchword resume RUN` happens if another process fails after the run has finished."""
    train(make_config(steps=1), tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        resume(tmp_path / "run")
    assert error.value.code == "run_finished"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    result = resume(tmp_path / "run")
    assert result is not None
    assert result.notes[-1].code == "finished"
    assert result.steps == 1
