"""Runs of several processes that are killed: all processes at once, or one of them; each ends bit for bit the same."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import (
    ENVIRONMENT,
    PATIENCE,
    Nursery,
    assert_exit_codes,
    at,
    end_of,
    leftovers,
    rows,
    shared_nursery,
    tiny,
    together,
    until,
    write_recipe,
)  # fmt: skip
from patchword.config import Config, DataConfig, DistillConfig, OptimConfig
from patchword.errors import ConfigError
from patchword.training import resume, train

STEPS = 20
AVERAGE = Path(__file__).parents[1] / "helpers/averaged_gradients.py"


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return shared_nursery()


def configured(**changes: Any) -> Config:
    """A batch that 2, 3 and 4 processes can divide, in two parts; evaluated, and saved if better, every fourth step."""
    plain: dict[str, Any] = {"model": tiny().model.replace(dropout=0.0, drop_path=0.0), "num_threads": 1}
    plain |= {"steps": STEPS, "batch_size": 48, "eval_every": 0.15, "save_every": 3600.0}
    return tiny(**{**plain, **changes})


def rich(teacher: str) -> Config:
    """Frozen weights, and gradients that are taken twice, with a second head for a teacher."""
    model = configured().model.replace(distillation=True, class_token=True, pooling="class")
    distill = DistillConfig(teacher=teacher, kind="soft")
    return configured(
        model=model, lora_rank=2, optim=OptimConfig(lr=3e-3, sam_rho=0.05, clip_grad_norm=1.0), distill=distill
    )


Undisturbed = Callable[[int, str], Path]


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run of so many processes, of a kind of configuration, beside its recipe; made once."""
    made: dict[tuple[int, str], Path] = {}

    def run(size: int, kind: str) -> Path:
        if (size, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}{size}")
            config = configured() if kind == "plain" else rich(str(run(1, "plain")))
            recipe = write_recipe(folder / "recipe.py", config)
            assert_exit_codes(together(nursery, size, recipe, folder / "run", folder / "log"), 0)
            made[size, kind] = folder / "run"
        return made[size, kind]

    return run


@pytest.mark.parametrize(("size", "kind"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "rich")])
def test_losses_are_those_of_one_process(undisturbed: Undisturbed, size: int, kind: str) -> None:
    pairs = list(zip(rows(undisturbed(size, kind)), rows(undisturbed(1, kind)), strict=True))
    assert len(pairs) > STEPS // 2
    for ours, theirs in pairs:
        name = "loss" if ours["kind"] == "train" else "nll"
        assert ours["step"] == theirs["step"]
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


@pytest.mark.parametrize(("size", "kind"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "rich")])
def test_kills_leave_no_trace(nursery: Nursery, undisturbed: Undisturbed, tmp_path: Path, size: int, kind: str) -> None:
    """All processes are killed at step 9; of those that resume, the last one at step 14, and the others leave."""
    reference, run = undisturbed(size, kind), tmp_path / "run"
    recipe = reference.with_name("recipe.py")
    for step, log in ((9, tmp_path / "first"), (14, tmp_path / "second")):
        children = together(nursery, size, recipe, run, log, "-1", "-1", str(step))
        sign = Path(f"{log}.0.paused")
        assert until(sign.exists)
        assert any((run / "checkpoints").glob("step-*"))
        if step == 9:
            for child in children:
                child.signal(signal.SIGKILL)
            assert_exit_codes(children, -signal.SIGKILL)
        else:
            assert children[-1].kill() == -signal.SIGKILL
            sign.unlink()
            assert_exit_codes(children[:-1], 1)
    assert_exit_codes(together(nursery, size, recipe, run, tmp_path / "log"), 0)
    assert end_of(run, STEPS) == end_of(reference, STEPS)
    assert leftovers(run) == []


DYING = """
import os, signal
from patchword.training.trainer import Trainer

if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    train_step = Trainer.train_step

    def last_breath(self, progress):
        if self.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, progress)

    Trainer.train_step = last_breath
"""


def test_torchrun_restarts_a_run(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """A recipe is Python, and this one kills its process: the second one, in the first attempt, before step 15."""
    reference, recipe = undisturbed(2, "plain"), tmp_path / "recipe.py"
    recipe.write_text(reference.with_name("recipe.py").read_text() + DYING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *torchrun, "-m", "patchword", "train", str(recipe), "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, **pipes) as process:
        patience = threading.Timer(2 * PATIENCE, process.terminate)  # which ends the workers, too, unlike a kill
        patience.start()
        output, told = process.communicate()
        patience.cancel()
    assert process.returncode == 0, told
    assert told.count("exitcode: -9") == 1 and ", resumed at step " in told, told
    assert end_of(tmp_path / "runs/tiny", STEPS) == end_of(reference, STEPS)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    assert json.loads(output)["steps"] == STEPS


def test_gradients_are_averaged(nursery: Nursery) -> None:
    """In buckets of a fixed order; a parameter that no process has a gradient for stays without."""
    assert_exit_codes(together(nursery, 3, script=AVERAGE), 0)


def test_resume_auto(nursery: Nursery, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The same command, typed again and again: it starts, resumes, and finds nothing left to do."""
    run, reference = tmp_path / "run", undisturbed(1, "plain")
    recipe = reference.with_name("recipe.py")
    child = nursery.run("train", recipe, "--out", run, "--resume", "auto", **at(STEPS // 2, signal.SIGTERM))
    assert child.wait() == 143, child.output()
    again = nursery.run("train", recipe, "--out", run, "--resume", "auto")
    assert again.wait() == 0 and ", resumed at step " in again.output(), again.output()
    assert end_of(run, STEPS) == end_of(reference, STEPS)
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    last = nursery.run("train", recipe, "--out", run, "--resume", "auto", "--json")
    assert last.wait() == 0 and f"{run} is already finished" in last.output(), last.output()
    assert f'"steps": {STEPS}' in last.output()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files


def test_another_configuration_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(steps=1)
    train(config, "named", resume="auto")
    before = Path("named/metrics.jsonl").read_bytes()
    other = config.replace(steps=2, optim=OptimConfig(lr=0.5))
    with pytest.raises(ConfigError) as refused:
        train(other, "named", resume="auto")
    assert refused.value.code == "run_differs"
    assert "optim.lr is 0.003 there, 0.5 here; steps is 1 there, 2 here." in str(refused.value)
    assert Path("named/metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError) as refused:
        train(config, "named")
    assert refused.value.code == "run_exists"
    with pytest.raises(ConfigError, match="resume is 'always'; it must be 'auto' or 'never'"):
        train(config, "named", resume="always")  # type: ignore[arg-type]


def test_the_last_run_of_a_name_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a directory: the last of runs/tiny, runs/tiny-2, ..., if it has this configuration; else a new one."""
    monkeypatch.chdir(tmp_path)
    config = configured(steps=1)
    other = config.replace(seed=1)
    outcomes = [train(each, resume="auto") for each in (config, config, other, other, config)]
    folders = ["tiny", "tiny", "tiny-2", "tiny-2", "tiny-3"]
    assert [outcome.run_dir for outcome in outcomes if outcome] == [Path("runs") / name for name in folders]
    first, second, *_ = outcomes
    assert first
    assert second
    assert (first.metrics, first.steps) == (second.metrics, second.steps)
    assert second.notes[-1].code == "finished"


def test_precision_that_was_chosen_stays(tmp_path: Path) -> None:
    """`auto` becomes a certain precision when a run begins, which is no other configuration."""
    config = configured(steps=1, precision="auto", data=DataConfig(source="digits", num_workers=0))
    for _ in range(2):
        outcome = train(config, tmp_path / "run", resume="auto")
    assert outcome
    assert outcome.notes[-1].code == "finished"


def test_existing_directory_ends_all_processes_with_the_same_message(nursery: Nursery, tmp_path: Path) -> None:
    """Only the first process creates the run directory, but no process may end with a connection error."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/other.txt").touch()
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom patchword.errors import ConfigError\nfrom patchword.recipes import load_recipe\n"
        "from patchword.training import train\n"
        "try:\n    train(load_recipe(sys.argv[1]), sys.argv[2])\n"
        "except ConfigError as error:\n    print(error.code)\n    sys.exit(2)\n"
    )
    recipe = write_recipe(tmp_path / "recipe.py", configured())
    children = together(nursery, 2, recipe, tmp_path / "run", script=script)
    assert_exit_codes(children, 2)
    assert [child.output().split()[-1] for child in children] == ["run_exists", "run_exists"]


def test_finished_run_that_torchrun_restarts_ends_without_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`patchword resume RUN`, restarted because another process failed after the run had finished."""
    train(configured(steps=1), tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        resume(tmp_path / "run")
    assert refused.value.code == "run_finished"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    result = resume(tmp_path / "run")
    assert result is not None
    assert result.notes[-1].code == "finished"
    assert result.steps == 1
