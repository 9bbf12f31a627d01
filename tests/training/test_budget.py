"""A run with a time budget ends on time with a trained model.

All tests but one train on a simulated clock, so that the machine's speed does not matter. benchmarks/budget_soak.py
measures wall-clock time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patchword as pw
from helpers.runs import leftovers, shared_fork_server, tiny_config, write_recipe
from patchword.config import AugmentConfig, Config, OptimConfig, ScheduleConfig
from patchword.training import pacing, resume, train
from patchword.training import run as run_module
from patchword.training.budget_clock import BudgetClock, StepClock
from patchword.training.callbacks import Callback
from patchword.training.checkpointing import CheckpointStore
from patchword.training.run_dir import read_metrics
from patchword.training.schedule import lr_factor
from patchword.training.trainer import Trainer

BUDGET = 30.0  # simulated seconds


def budget_config(budget: float, **changes: Any) -> Config:
    """Learns the digits in about a hundred steps."""
    config = tiny_config(
        model=tiny_config().model.replace(dropout=0.0, attention_dropout=0.0, drop_path=0.0),
        augment=AugmentConfig(),
        optim=OptimConfig(name="muon", lr=1e-2, muon_lr=0.05, momentum=0.95),
        grad_accum_steps=1,
        ema=0.9,
        eval_every=2.0,
        save_every=2.0,
    )
    return config.replace(budget=budget, steps=None, **changes)


class ManualClock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class SimulatedMachine(ManualClock):
    """A clock that only steps, evaluations and saves advance; the training itself is real."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds: Callable[[float], float] = lambda elapsed: 0.2  # for a step that begins at `elapsed`
        self.eval_seconds = 0.002  # per image: a third of training on one
        self.save_seconds = 0.1  # per checkpoint

    @property
    def elapsed(self) -> float:
        return self.seconds - 1000.0

    def timed(self, function: Any, cost: Callable[..., float]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.seconds += cost(*args)
            return result

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimulatedMachine:
    simulated = SimulatedMachine()
    train_step = simulated.timed(Trainer.train_step, lambda *_: simulated.step_seconds(simulated.elapsed))
    monkeypatch.setattr(Trainer, "train_step", train_step)
    evaluate = simulated.timed(
        run_module.evaluate_split, lambda model, loader: simulated.eval_seconds * len(loader.source)
    )
    monkeypatch.setattr(run_module, "evaluate_split", evaluate)
    save = simulated.timed(CheckpointStore.save, lambda *_: simulated.save_seconds)
    monkeypatch.setattr(CheckpointStore, "save", save)
    return simulated


class InterruptAt(Callback):
    """Ends a run at a given time without saving, like a kill."""

    def __init__(self, machine: SimulatedMachine, seconds: float) -> None:
        self.machine, self.seconds = machine, seconds

    def on_step(self, row: dict[str, Any], progress: float, seconds_left: float) -> None:
        if self.machine.elapsed >= self.seconds:
            raise KeyboardInterrupt


def check_finished(run: Path, min_top1: float = 0.5) -> list[dict[str, Any]]:
    """Check that the run is finished and far better than chance (0.1); return the rows of metrics.jsonl."""
    assert pw.Classifier.load(str(run)).labels == tuple("0123456789")
    rows = read_metrics(run)
    assert rows[-1]["kind"] == "test"
    assert rows[-1]["top1"] > min_top1
    assert rows[-2]["kind"] == "val" and rows[-2]["step"] == rows[-1]["step"], "the last step was not evaluated"
    assert leftovers(run) == []
    return rows


@pytest.mark.slow
def test_budget_run_ends_on_time(machine: SimulatedMachine, tmp_path: Path) -> None:
    result = train(budget_config(BUDGET), tmp_path / "run", now=machine)
    rows = check_finished(tmp_path / "run")
    assert BUDGET - 3 < machine.elapsed <= BUDGET
    assert result is not None
    assert result.seconds == pytest.approx(machine.elapsed)
    lrs = [row["lr"] for row in rows if row["kind"] == "train"]
    assert lrs[-1] < 0.1 * max(lrs), "the schedule did not reach its end"


@pytest.mark.slow
def test_startup_time_counts_towards_budget(machine: SimulatedMachine, tmp_path: Path) -> None:
    train(budget_config(BUDGET), tmp_path / "run", now=machine, started=machine() - 12.0)
    check_finished(tmp_path / "run")
    assert BUDGET - 12 - 3 < machine.elapsed <= BUDGET - 12


@pytest.mark.slow
@pytest.mark.parametrize("slow_third", [0, 1, 2])
def test_budget_run_ends_on_time_despite_temporary_slowdown(
    machine: SimulatedMachine, tmp_path: Path, slow_third: int
) -> None:
    machine.step_seconds = lambda elapsed: 0.8 if slow_third <= 3 * elapsed / BUDGET < slow_third + 1 else 0.2
    train(budget_config(BUDGET), tmp_path / "run", now=machine)
    check_finished(tmp_path / "run", min_top1=0.3)
    assert BUDGET - 4 < machine.elapsed <= BUDGET


@pytest.mark.slow
@pytest.mark.parametrize("eval_every", [0.25, 1e6], ids=["measured", "estimated"])
def test_budget_run_ends_on_time_with_slow_evaluation(
    machine: SimulatedMachine, tmp_path: Path, eval_every: float
) -> None:
    """The final evaluation of both splits takes 3 s; without an earlier one, its time is estimated from the steps."""
    machine.eval_seconds, machine.step_seconds = 0.006, lambda elapsed: 0.5
    train(budget_config(BUDGET, eval_every=eval_every), tmp_path / "run", now=machine)
    rows = check_finished(tmp_path / "run", min_top1=0.2)
    assert BUDGET - 4 < machine.elapsed <= BUDGET
    earlier = [row for row in rows[:-2] if row["kind"] == "val"]
    assert bool(earlier) == (eval_every == 0.25)
    assert len(earlier) * 0.006 * 144 <= pacing.MAX_EVAL_FRACTION * BUDGET


def test_budget_run_ends_on_time_with_slow_saving(machine: SimulatedMachine, tmp_path: Path) -> None:
    """The last save follows the last step."""
    machine.save_seconds = 2.0
    train(budget_config(BUDGET), tmp_path / "run", now=machine)
    rows = check_finished(tmp_path / "run", min_top1=0.3)
    assert machine.elapsed <= BUDGET
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert last["seconds"] < BUDGET - machine.save_seconds, "no time was reserved for the last save"


@pytest.mark.slow
@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["from a checkpoint", "before the first checkpoint"])
def test_time_before_kill_counts_towards_budget(
    machine: SimulatedMachine, tmp_path: Path, has_checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the time of steps that the kill has undone."""
    if not has_checkpoint:
        monkeypatch.setattr(pacing.Pacing, "is_save_due", lambda self: False)
    config = budget_config(BUDGET, eval_every=1e6)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", now=machine, callbacks=(InterruptAt(machine, 18.0),))
    assert (tmp_path / "run/checkpoints").exists() == has_checkpoint
    resume(tmp_path / "run", now=machine)
    check_finished(tmp_path / "run", min_top1=0.3)
    # Time is known from metrics.jsonl, which has every tenth step: up to nine steps and a save are not counted.
    assert BUDGET - 3 < machine.elapsed <= BUDGET + 9 * 0.2 + machine.save_seconds


def test_resume_with_spent_budget_makes_no_steps(machine: SimulatedMachine, tmp_path: Path) -> None:
    """The run is killed before its first evaluation."""
    config = budget_config(BUDGET, eval_every=1e6)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", now=machine, callbacks=(InterruptAt(machine, 10.0),))
    (last,) = sorted((tmp_path / "run/checkpoints").glob("step-*"))[-1:]
    result = resume(tmp_path / "run", now=machine, started=machine() - 100)
    assert result is not None
    assert result.steps == int(last.name.removeprefix("step-"))
    check_finished(tmp_path / "run", min_top1=0.15)


def test_budget_too_short_for_second_step_is_reported(machine: SimulatedMachine, tmp_path: Path) -> None:
    machine.step_seconds = lambda elapsed: 40.0
    result = train(budget_config(BUDGET), tmp_path / "run", now=machine)
    assert result is not None
    assert result.steps == 1
    assert any(note.code == "budget_too_short" and "40 s" in note for note in result.notes)


@pytest.mark.slow
def test_train_command_with_budget_finishes(tmp_path: Path) -> None:
    """On the real clock, so nothing is asserted about time or accuracy."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", budget_config(2.0))
    child = shared_fork_server().start("train", recipe, "--out", run)
    assert child.wait() == 0, child.output()
    check_finished(run, min_top1=-1)


# ---- clocks


def test_budget_clock_progress_follows_time() -> None:
    now = ManualClock()
    clock = BudgetClock(60.0, spent=0.0, started=990.0, now=now)  # startup took ten seconds
    clock.reserve = 10.0
    assert clock.elapsed == pytest.approx(10.0)
    assert clock.progress(0) == 0.0  # the schedule begins with the first step
    now.seconds += 20
    assert clock.progress(7) == pytest.approx(0.5)
    assert clock.seconds_left(7, 0.1) == pytest.approx(30.0)
    now.seconds += 1000
    assert clock.progress(8) == 1.0
    assert clock.seconds_left(8, 0.1) == 0.0


def test_budget_clock_stops_before_step_that_would_end_late() -> None:
    now = ManualClock()
    clock = BudgetClock(60.0, spent=0.0, started=1000.0, now=now)
    clock.reserve = 10.0
    for seconds in (1.0, 4.0, 2.0, 30.0, 3.0):  # including a stall
        clock.record_step(seconds)
    now.seconds += 45.9
    assert not clock.is_over(9)
    now.seconds += 0.2
    assert clock.is_over(9)
    assert not clock.is_over(0), "at least one step is made"


def test_budget_clock_counts_time_of_earlier_processes() -> None:
    clock = BudgetClock(60.0, spent=45.0, started=1000.0, now=ManualClock())
    clock.first_step_at = 15.0
    assert clock.progress(5) == pytest.approx(30 / 45)
    assert not clock.is_over(5)
    assert BudgetClock(60.0, spent=60.5, started=1000.0, now=ManualClock()).is_over(5)


@pytest.mark.parametrize("stall", [0.0, 20.0])
def test_budget_clock_decays_learning_rate_with_uneven_steps(stall: float) -> None:
    now, schedule = ManualClock(), ScheduleConfig(shape="cosine", warmup_fraction=0.1)
    clock = BudgetClock(60.0, spent=0.0, started=1000.0, now=now)
    clock.reserve = 5.0
    step, factors = 0, []
    while not clock.is_over(step):
        factors.append(lr_factor(schedule, clock.progress(step)))
        seconds = stall if step == 100 and stall else 0.1 + 0.1 * (step % 3)
        now.seconds += seconds
        clock.record_step(seconds)
        step += 1
    assert now.seconds - 1000 <= 55.0
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[-1] < 0.01
    peak = factors.index(max(factors))
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_step_clock_counts_steps() -> None:
    clock = StepClock(40)
    assert clock.progress(10) == 0.25
    assert not clock.is_over(39)
    assert clock.is_over(40)
    assert clock.seconds_left(30, 0.5) == 5.0
