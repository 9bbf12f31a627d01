"""A run with a budget ends on time with a model that is worth having, whatever happens to the machine meanwhile."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import patchword as pw
from patchword.config import AugmentConfig, Config, OptimConfig, ScheduleConfig
from patchword.training.folder import read_rows
from patchword.training.schedule import BudgetClock, StepClock, rate
from runs import Child, Nursery, go_on, is_finished, leftovers, shared_nursery, tiny, until, write_recipe

TOLERANCE = 5.0  # seconds; what we promise


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return shared_nursery()


def learner(budget: float, **changes: Any) -> Config:
    """Learns the digits within seconds."""
    plain = tiny(
        model=tiny().model.replace(dropout=0.0, drop_path=0.0),
        augment=AugmentConfig(),
        optim=OptimConfig(name="muon", lr=1e-2, muon_lr=0.05, momentum=0.95),
        accumulate=1,
        ema=0.9,
        evaluate_every=2.0,
        save_every=0.5,
    )
    return plain.replace(budget=budget, steps=None, **changes)


def check_end(run: Path, child: Child, seconds: float, budget: float, least: float = 0.3) -> None:
    """On time, finished, and far better than chance, which is 0.1."""
    assert child.wait() == 0, child.said()
    assert seconds < budget + TOLERANCE, f"{seconds:.1f} s of {budget:.1f} s: {child.said()}"
    assert pw.Classifier.load(str(run)).labels == tuple("0123456789")
    rows = read_rows(run)
    assert rows[-1]["kind"] == "test" and rows[-1]["top1"] > least
    assert leftovers(run) == []


def timed(nursery: Nursery, recipe: str, run: Path) -> tuple[Child, float]:
    start = time.monotonic()
    child = go_on(nursery, recipe, run)
    until(lambda: is_finished(run))
    return child, time.monotonic() - start


def test_it_ends_on_time(nursery: Nursery, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", learner(3.0))
    child, seconds = timed(nursery, recipe, run)
    check_end(run, child, seconds, 3.0, least=0.5)
    assert seconds > 1.5, "the budget is there to be used"
    rows = read_rows(run)
    rates = [row["lr"] for row in rows if row["kind"] == "train"]
    assert rates[-1] < 0.1 * max(rates), "the schedule came to its end, too"
    assert rows[-2]["kind"] == "val" and rows[-2]["step"] == rows[-1]["step"], "the last step was evaluated"


@pytest.fixture
def competitors() -> Iterator[list[subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_it_ends_on_time_on_a_machine_that_is_slow_for_a_while(
    nursery: Nursery, tmp_path: Path, competitors: list[subprocess.Popen]
) -> None:
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", learner(4.0))
    start = time.monotonic()
    child = go_on(nursery, recipe, run)
    until(lambda: False, 1.0)
    competitors += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    until(lambda: False, 1.5)
    while competitors:
        competitors[-1].kill()
        competitors.pop().wait()
    until(lambda: is_finished(run))
    check_end(run, child, time.monotonic() - start, 4.0)


SLOW = """
import sys, time
from patchword.data.open import completed
from patchword.data.named import named_set
from patchword.data.sources import ArraySource
from patchword.recipes import load_recipe
from patchword.training import train

class Slow(ArraySource):
    def read(self, index, **options):
        time.sleep(float(sys.argv[3]))
        return super().read(index, **options)

def slow(source):
    # Twice the size that the model takes, so that pictures are read one by one, like files.
    return Slow(source.images.repeat(2, 1).repeat(2, 2), source.labels, source.targets, source.title)

parts = completed(named_set("digits"), 0.1, 0)
parts.__dict__.update(val=slow(parts.val), test=slow(parts.test))
train(load_recipe(sys.argv[1]), sys.argv[2], parts=parts)
"""


@pytest.mark.parametrize("evaluate_every", [2.0, 1e6], ids=["known", "unknown"])
def test_it_ends_on_time_where_evaluation_is_slow(nursery: Nursery, tmp_path: Path, evaluate_every: float) -> None:
    """One evaluation of both parts takes 1.5 s; and where none is made before the last, that cannot be known."""
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.py", learner(4.0, evaluate_every=evaluate_every))
    (tmp_path / "slow.py").write_text(SLOW)
    start = time.monotonic()
    child = nursery.run(tmp_path / "slow.py", recipe, run, "0.003")
    until(lambda: is_finished(run))
    check_end(run, child, time.monotonic() - start, 4.0)


def test_it_ends_on_time_where_saving_is_slow(nursery: Nursery, tmp_path: Path) -> None:
    """A save takes a second here, and the last one comes after the last step."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", learner(5.0))
    (tmp_path / "slow.py").write_text(
        "import os, sys, time\nfrom patchword.recipes import load_recipe\nfrom patchword.training import train\n"
        "sync = os.fsync\nos.fsync = lambda handle: (time.sleep(0.1), sync(handle))\n"
        "train(load_recipe(sys.argv[1]), sys.argv[2])\n"
    )
    start = time.monotonic()
    child = nursery.run(tmp_path / "slow.py", recipe, run)
    until(lambda: is_finished(run))
    check_end(run, child, time.monotonic() - start, 5.0)
    last = [row for row in read_rows(run) if row["kind"] == "train"][-1]
    assert last["seconds"] < 5.0 - 2.0, "there was time for saving"


def test_time_before_a_kill_counts(nursery: Nursery, tmp_path: Path) -> None:
    """Even that of steps which the kill has undone."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", learner(5.0, save_every=3600.0))
    child = go_on(nursery, recipe, run)
    until(lambda: False, 3.0)
    assert child.kill() == -signal.SIGKILL
    child, seconds = timed(nursery, recipe, run)
    check_end(run, child, 3.0 + seconds, 5.0)
    assert seconds < 3.0, "a new budget would have taken 4 s at least"


def test_a_budget_that_is_spent_is_an_end(nursery: Nursery, tmp_path: Path) -> None:
    """Stopped before anything was evaluated, and resumed when no time is left."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", learner(4.0, evaluate_every=1e6))
    child = go_on(nursery, recipe, run)
    assert until(lambda: (run / "metrics.jsonl").exists())
    until(lambda: False, 1.0)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143, child.said()
    late = tmp_path / "late.py"
    late.write_text(
        "import sys, time\nfrom patchword.training import resume\nresume(sys.argv[1], started=time.monotonic() - 100)\n"
    )
    child = nursery.run(late, run)
    check_end(run, child, 0.0, 4.0, least=0.15)


# The arithmetic, on a clock of our own.


class Time:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_the_clock_lays_the_schedule_over_time() -> None:
    now = Time()
    clock = BudgetClock(60.0, spent=0.0, started=990.0, now=now)  # ten seconds went into starting
    clock.reserve = 10.0
    assert clock.elapsed == pytest.approx(10.0)
    assert clock.progress(0) == 0.0  # the schedule begins with the first step
    now.seconds += 20
    assert clock.progress(7) == pytest.approx(0.5)
    assert clock.left(7, 0.1) == pytest.approx(30.0)
    now.seconds += 1000
    assert clock.progress(8) == 1.0 and clock.left(8, 0.1) == 0.0


def test_the_clock_stops_before_a_step_that_would_end_too_late() -> None:
    now = Time()
    clock = BudgetClock(60.0, spent=0.0, started=1000.0, now=now)
    clock.reserve = 10.0
    for seconds in (1.0, 4.0, 2.0, 30.0, 3.0):  # one of them stalled
        clock.made(seconds)
    now.seconds += 45.9
    assert not clock.over(9)
    now.seconds += 0.2
    assert clock.over(9)
    assert not clock.over(0), "one step is made in any case"


def test_the_clock_counts_what_was_spent_before() -> None:
    clock = BudgetClock(60.0, spent=45.0, started=1000.0, now=Time())
    clock.begun = 15.0
    assert clock.progress(5) == pytest.approx(30 / 45) and not clock.over(5)
    assert BudgetClock(60.0, spent=60.5, started=1000.0, now=Time()).over(5)


@pytest.mark.parametrize("stall", [0.0, 20.0])
def test_the_rate_comes_down_however_uneven_the_steps_are(stall: float) -> None:
    now, schedule = Time(), ScheduleConfig(shape="cosine", warmup=0.1)
    clock = BudgetClock(60.0, spent=0.0, started=1000.0, now=now)
    clock.reserve = 5.0
    step, rates = 0, []
    while not clock.over(step):
        rates.append(rate(schedule, clock.progress(step)))
        took = stall if step == 100 and stall else 0.1 + 0.1 * (step % 3)
        now.seconds += took
        clock.made(took)
        step += 1
    assert now.seconds - 1000 <= 55.0
    assert max(rates) == pytest.approx(1.0, abs=0.01) and rates[-1] < 0.01
    peak = rates.index(max(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_a_clock_of_steps_knows_no_time() -> None:
    clock = StepClock(40)
    assert clock.progress(10) == 0.25 and not clock.over(39) and clock.over(40)
    assert clock.left(30, 0.5) == 5.0
