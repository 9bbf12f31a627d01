"""A run with a budget ends on time with a model that is worth having.

All but one of these tests train on a simulated clock, so that nothing depends on how fast the machine is. What is
promised of wall-clock time is measured by benchmarks/budget_soak.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patchword as pw
from helpers.runs import leftovers, shared_nursery, tiny, write_recipe
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


def learner(budget: float, **changes: Any) -> Config:
    """Learns the digits in about a hundred steps."""
    plain = tiny(
        model=tiny().model.replace(dropout=0.0, drop_path=0.0),
        augment=AugmentConfig(),
        optim=OptimConfig(name="muon", lr=1e-2, muon_lr=0.05, momentum=0.95),
        grad_accum_steps=1,
        ema=0.9,
        eval_every=2.0,
        save_every=2.0,
    )
    return plain.replace(budget=budget, steps=None, **changes)


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Machine(Time):
    """A clock that only steps, evaluations and saves move; the training itself is real."""

    def __init__(self) -> None:
        super().__init__()
        self.step: Callable[[float], float] = lambda elapsed: 0.2  # seconds of a step that begins at `elapsed`
        self.image = 0.002  # seconds of evaluating an image: a third of training on one
        self.save = 0.1  # seconds of saving a checkpoint

    @property
    def elapsed(self) -> float:
        return self.seconds - 1000.0

    def slowed(self, function: Any, cost: Callable[..., float]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.seconds += cost(*arguments)
            return result

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(Trainer, "train_step", made.slowed(Trainer.train_step, lambda *_: made.step(made.elapsed)))
    evaluate = made.slowed(run_module.evaluate_split, lambda model, loader: made.image * len(loader.source))
    monkeypatch.setattr(run_module, "evaluate_split", evaluate)
    monkeypatch.setattr(CheckpointStore, "save", made.slowed(CheckpointStore.save, lambda *_: made.save))
    return made


class Dies(Callback):
    """Ends a run at a given second, as a kill does: nothing is saved."""

    def __init__(self, machine: Machine, second: float) -> None:
        self.machine, self.second = machine, second

    def on_step(self, row: dict[str, Any], progress: float, seconds_left: float) -> None:
        if self.machine.elapsed >= self.second:
            raise KeyboardInterrupt


def check_end(run: Path, least: float = 0.5) -> list[dict[str, Any]]:
    """Finished, and far better than chance, which is 0.1; returns the rows."""
    assert pw.Classifier.load(str(run)).labels == tuple("0123456789")
    rows = read_metrics(run)
    assert rows[-1]["kind"] == "test"
    assert rows[-1]["top1"] > least
    assert rows[-2]["kind"] == "val" and rows[-2]["step"] == rows[-1]["step"], "the last step was evaluated"
    assert leftovers(run) == []
    return rows


def test_it_ends_on_time(machine: Machine, tmp_path: Path) -> None:
    outcome = train(learner(BUDGET), tmp_path / "run", now=machine)
    rows = check_end(tmp_path / "run")
    assert BUDGET - 3 < machine.elapsed <= BUDGET, "the budget is there to be used"
    assert outcome is not None
    assert outcome.seconds == pytest.approx(machine.elapsed)
    rates = [row["lr"] for row in rows if row["kind"] == "train"]
    assert rates[-1] < 0.1 * max(rates), "the schedule came to its end, too"


def test_time_before_the_first_step_counts(machine: Machine, tmp_path: Path) -> None:
    train(learner(BUDGET), tmp_path / "run", now=machine, started=machine() - 12.0)
    check_end(tmp_path / "run")
    assert BUDGET - 12 - 3 < machine.elapsed <= BUDGET - 12


@pytest.mark.parametrize("third", [0, 1, 2])
def test_it_ends_on_time_on_a_machine_that_is_slow_for_a_while(machine: Machine, tmp_path: Path, third: int) -> None:
    machine.step = lambda elapsed: 0.8 if third <= 3 * elapsed / BUDGET < third + 1 else 0.2
    train(learner(BUDGET), tmp_path / "run", now=machine)
    check_end(tmp_path / "run", least=0.3)
    assert BUDGET - 4 < machine.elapsed <= BUDGET


@pytest.mark.parametrize("eval_every", [0.25, 1e6], ids=["known", "unknown"])
def test_it_ends_on_time_where_evaluation_is_slow(machine: Machine, tmp_path: Path, eval_every: float) -> None:
    """The last evaluation of both splits takes three seconds; where none is made before, steps tell how long it is."""
    machine.image, machine.step = 0.006, lambda elapsed: 0.5
    train(learner(BUDGET, eval_every=eval_every), tmp_path / "run", now=machine)
    rows = check_end(tmp_path / "run", least=0.2)
    assert BUDGET - 4 < machine.elapsed <= BUDGET
    before = [row for row in rows[:-2] if row["kind"] == "val"]
    assert bool(before) == (eval_every == 0.25)
    assert len(before) * 0.006 * 144 <= pacing.MAX_EVAL_FRACTION * BUDGET, (
        "evaluations take a tenth of the time at most"
    )


def test_it_ends_on_time_where_saving_is_slow(machine: Machine, tmp_path: Path) -> None:
    """The last save comes after the last step."""
    machine.save = 2.0
    train(learner(BUDGET), tmp_path / "run", now=machine)
    rows = check_end(tmp_path / "run", least=0.3)
    assert machine.elapsed <= BUDGET
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert last["seconds"] < BUDGET - machine.save, "there was time for saving"


@pytest.mark.parametrize("lost", [False, True], ids=["from a checkpoint", "before the first checkpoint"])
def test_time_before_a_kill_counts(machine: Machine, tmp_path: Path, lost: bool, monkeypatch: Any) -> None:
    """Even that of steps which the kill has undone."""
    if lost:
        monkeypatch.setattr(pacing.Pacing, "is_save_due", lambda self: False)
    config, seconds = learner(BUDGET, eval_every=1e6), 18.0
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", now=machine, callbacks=(Dies(machine, seconds),))
    assert (tmp_path / "run/checkpoints").exists() != lost
    resume(tmp_path / "run", now=machine)
    check_end(tmp_path / "run", least=0.3)
    # Every tenth step has a row, by which the time is known: of at most nine steps and a save it is not.
    assert BUDGET - 3 < machine.elapsed <= BUDGET + 9 * 0.2 + machine.save


def test_a_budget_that_is_spent_is_an_end(machine: Machine, tmp_path: Path) -> None:
    """Killed before anything was evaluated, and resumed when no time is left: not a single step more is made."""
    with pytest.raises(KeyboardInterrupt):
        config = learner(BUDGET, eval_every=1e6)
        train(config, tmp_path / "run", now=machine, callbacks=(Dies(machine, 10.0),))
    (last,) = sorted((tmp_path / "run/checkpoints").glob("step-*"))[-1:]
    outcome = resume(tmp_path / "run", now=machine, started=machine() - 100)
    assert outcome is not None
    assert outcome.steps == int(last.name.removeprefix("step-"))
    check_end(tmp_path / "run", least=0.15)


def test_a_budget_too_short_for_a_second_step_is_reported(machine: Machine, tmp_path: Path) -> None:
    machine.step = lambda elapsed: 40.0
    outcome = train(learner(BUDGET), tmp_path / "run", now=machine)
    assert outcome is not None
    assert outcome.steps == 1
    assert any(note.code == "budget_too_short" and "40 s" in note for note in outcome.notes)


def test_a_command_with_a_budget_comes_to_its_end(tmp_path: Path) -> None:
    """On the real clock, of which nothing is expected here but that it runs."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", learner(2.0))
    child = shared_nursery().run("train", recipe, "--out", run)
    assert child.wait() == 0, child.output()
    check_end(run, least=-1)


# The arithmetic, on a clock of our own.


def test_the_clock_lays_the_schedule_over_time() -> None:
    now = Time()
    clock = BudgetClock(60.0, spent=0.0, started=990.0, now=now)  # ten seconds went into starting
    clock.reserve = 10.0
    assert clock.elapsed == pytest.approx(10.0)
    assert clock.progress(0) == 0.0  # the schedule begins with the first step
    now.seconds += 20
    assert clock.progress(7) == pytest.approx(0.5)
    assert clock.seconds_left(7, 0.1) == pytest.approx(30.0)
    now.seconds += 1000
    assert clock.progress(8) == 1.0
    assert clock.seconds_left(8, 0.1) == 0.0


def test_the_clock_stops_before_a_step_that_would_end_too_late() -> None:
    now = Time()
    clock = BudgetClock(60.0, spent=0.0, started=1000.0, now=now)
    clock.reserve = 10.0
    for seconds in (1.0, 4.0, 2.0, 30.0, 3.0):  # one of them stalled
        clock.record_step(seconds)
    now.seconds += 45.9
    assert not clock.is_over(9)
    now.seconds += 0.2
    assert clock.is_over(9)
    assert not clock.is_over(0), "one step is made in any case"


def test_the_clock_counts_what_was_spent_before() -> None:
    clock = BudgetClock(60.0, spent=45.0, started=1000.0, now=Time())
    clock.first_step_at = 15.0
    assert clock.progress(5) == pytest.approx(30 / 45)
    assert not clock.is_over(5)
    assert BudgetClock(60.0, spent=60.5, started=1000.0, now=Time()).is_over(5)


@pytest.mark.parametrize("stall", [0.0, 20.0])
def test_the_rate_comes_down_however_uneven_the_steps_are(stall: float) -> None:
    now, schedule = Time(), ScheduleConfig(shape="cosine", warmup_fraction=0.1)
    clock = BudgetClock(60.0, spent=0.0, started=1000.0, now=now)
    clock.reserve = 5.0
    step, rates = 0, []
    while not clock.is_over(step):
        rates.append(lr_factor(schedule, clock.progress(step)))
        took = stall if step == 100 and stall else 0.1 + 0.1 * (step % 3)
        now.seconds += took
        clock.record_step(took)
        step += 1
    assert now.seconds - 1000 <= 55.0
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] < 0.01
    peak = rates.index(max(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_a_clock_of_steps_knows_no_time() -> None:
    clock = StepClock(40)
    assert clock.progress(10) == 0.25
    assert not clock.is_over(39)
    assert clock.is_over(40)
    assert clock.seconds_left(30, 0.5) == 5.0
