"""Training from the first step to the published model, in one process or many, through kills and resumptions.

`train` starts a run, `resume` goes on with one; both come to the same end. A run can be cut off anywhere: what counts
is the last checkpoint, and from it the same steps are made again, bit for bit.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..config import Config
from ..config.config_checks import config_notes
from ..core.runtime import Stop, thread_limit
from ..data.check_readable import require_readable
from ..data.resolve import open_data, subsample, with_validation
from ..data.sources import DatasetSplits
from ..errors import ConfigError, Note, Stopped, TrainingError
from .allocator import keep_memory
from .auto_resume import ResumeMode, finished_outcome, run_to_resume
from .callbacks import Callback, RunInfo, TrainResult
from .checkpointing import Snapshot, Store
from .distributed import ProcessGroup
from .finish import finish
from .nan_guard import Fault, write_fault
from .precision import resolve_precision
from .run_dir import (
    Metrics,
    is_finished,
    new_folder,
    read_config,
    read_split,
    seconds_spent,
    take_back,
    tidy,
    update_config,
    write_split,
)
from .schedule import BudgetClock, Clock, StepClock
from .trainer import NotANumber, Trainer
from .validation import Answers, ask

EVALUATION_SHARE = 0.1  # of a budget goes to evaluations before the last
MOST_EVALUATIONS = 200  # of a run; with few pictures an epoch is over in no time
ENDS = {
    0.0: "The fine-tuned weights",
    1.0: "The initial weights",
}  # evaluated beside their interpolation, by init weight
EARLY, EVERY = 10, 10  # steps that get a row: the first ones, and every tenth


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    parts: DatasetSplits | None = None,
    watchers: tuple[Callback, ...] = (),
    resume: ResumeMode = "never",
    started: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> TrainResult | None:
    """Trains as `config` says and returns what came of it; the run folder is `out`, or a new one below runs/.

    Of several processes only the first returns an outcome.

    Args:
        parts: the data, where they are in memory already; otherwise config.data says where they are.
        resume: "auto" continues the run in `out` (without `out`, the last one of this name), if there is one with the
            same config; "never" refuses a directory that exists. A process that torchrun has restarted always resumes.
        started: now() when the budget began to run; the present, if not given.
        now: the clock, in seconds, that budgets and the time between checkpoints are measured by.
    """
    started = now() if started is None else started
    with contextlib.closing(ProcessGroup()) as world, thread_limit(config.num_threads):
        found = run_to_resume(config, out, resume, world)
        if found is not None:
            if world.from_first(lambda: is_finished(found)):
                return finished_outcome(found, watchers) if world.first else None
            return resumed_run(found, parts, world, watchers, started, now).go()
        config = config.replace(precision=resolve_precision(config.precision, world.device))
        opened = open_splits(config, parts, None)  # a wrong path is told before there is a folder
        for name, part in opened.present().items():
            require_readable(part, f"The part {name!r}")
        folder = Path(world.shared(str(new_folder(config, out)) if world.first else None))
        try:
            run = Run(folder, config, opened, world, watchers, started, now)
        except BaseException:
            if world.first:  # wrong weights, say: a folder without a single step would only be in the way
                take_back(folder)
            raise
        return run.go()


def resume(
    folder: str | Path,
    *,
    parts: DatasetSplits | None = None,
    watchers: tuple[Callback, ...] = (),
    started: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> TrainResult | None:
    """Goes on with a run that was cut off, from its last whole checkpoint."""
    started = now() if started is None else started
    folder = Path(folder).expanduser()
    config = read_config(folder)
    if is_finished(folder):
        raise ConfigError(f"{folder} is finished; there is nothing to resume. Its report is {folder / 'report.html'}.")
    with contextlib.closing(ProcessGroup()) as world, thread_limit(config.num_threads):
        return resumed_run(folder, parts, world, watchers, started, now).go()


def resumed_run(
    folder: Path,
    parts: DatasetSplits | None,
    world: ProcessGroup,
    watchers: tuple[Callback, ...],
    started: float,
    now: Callable[[], float],
) -> "Run":
    config = read_config(folder)
    resolve_precision(config.precision, world.device)  # the run may have begun on another machine
    return Run(folder, config, open_splits(config, parts, read_split(folder)), world, watchers, started, now)


def open_splits(config: Config, parts: DatasetSplits | None, saved: dict[str, Any] | None) -> DatasetSplits:
    if parts is not None:
        whole = with_validation(parts, config.data.val_fraction, config.seed, saved)
        return subsample(whole, config.data.train_fraction, config.seed)
    if not config.data.source:
        raise ConfigError("No data: give them after the recipe, as in `patchword train finetune --data.source photos`.")
    return open_data(config.data, config.seed, saved)


class Run:
    """One process's part in a run."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        parts: DatasetSplits,
        world: ProcessGroup,
        watchers: tuple[Callback, ...],
        started: float,
        now: Callable[[], float],
    ) -> None:
        self.folder, self.parts, self.world, self.now = folder, parts, world, now
        keep_memory()
        self.watchers = watchers if world.first else ()
        self.store = Store(folder, config.keep_last)
        found = self.store.load()
        self.trainer = Trainer(config, parts, world, fresh=found is None)
        self.config = self.trainer.config
        self.best: dict[str, Any] | None = None
        self.begun: float | None = None  # see BudgetClock
        self.started, self.spent, self.length = started, seconds_spent(folder), 0
        self.notes = [*config_notes(self.config), *self.trainer.notes]
        if found is not None:
            snapshot, model, complaints = found
            self.trainer.restore(snapshot.step, model, snapshot.tensors)
            self.best, self.length, self.begun = snapshot.best, snapshot.metrics_bytes, snapshot.notes.get("begun")
            self.spent = max(self.spent, snapshot.seconds)
            self.notes = [*map(Note.from_json, snapshot.notes.get("told", self.notes)), *complaints]
        self.resumed_at = self.trainer.step
        self.clock = self.make_clock()
        self.evaluation_seconds = self.trainer.inference_seconds * (2 if self.config.tta_flip else 1)
        self.evaluating = self.evaluated_at = self.saving = 0.0
        self.saved_at = self.now()
        self.step_seconds = 0.0  # of the last step

    def make_clock(self) -> Clock:
        if self.config.budget is not None:
            clock = BudgetClock(self.config.budget, self.spent, self.started, self.now)
            clock.begun = self.begun
            return clock
        samples = self.config.epochs * len(self.parts.train)
        return StepClock(self.config.steps or max(1, math.ceil(samples / self.config.batch_size)))

    @property
    def seconds(self) -> float:
        return self.spent + self.now() - self.started

    def go(self) -> TrainResult | None:
        outcome, begun = None, []
        try:
            if self.world.first:
                self.metrics = Metrics(self.folder, self.length)  # refuses if another process is at it
                tidy(self.folder)
                self.store.tidy()
                update_config(self.folder, self.config)
                if read_split(self.folder) is None:
                    write_split(self.folder, self.parts.split)
            for watcher in self.watchers:
                watcher.begin(self.briefing())
                begun.append(watcher)
            with Stop() as stop:
                self.steps(stop)
            outcome = finish(self)
            return outcome
        finally:
            if self.world.first and hasattr(self, "metrics"):
                self.metrics.close()
            self.trainer.close()
            for watcher in begun:
                watcher.end(outcome)

    def briefing(self) -> RunInfo:
        count = sum(p.numel() for p in self.trainer.model.parameters())
        trained = sum(p.numel() for p in self.trainer.parameters)
        samples = {name: len(part) for name, part in self.parts.present().items()}
        steps = self.clock.steps if isinstance(self.clock, StepClock) else None
        return RunInfo(
            self.folder, self.config, count, trained, samples, len(self.trainer.labels), steps, self.resumed_at,
            tuple(self.notes),
        )  # fmt: skip

    def steps(self, stop: Stop) -> None:
        trainer, clock = self.trainer, self.clock
        trainer.begin()
        over = self.world.shared(clock.over(trainer.step))
        while not over:
            start = self.now()
            progress = self.world.shared(clock.progress(trainer.step))
            try:
                made = trainer.advance(progress)
            except NotANumber as error:
                self.stop_at_fault(*error.args[0])
            self.learn_pace(self.now() - start)
            self.note_step(made, self.now() - start)
            over = self.world.shared(clock.over(trainer.step))
            if over or self.evaluation_due():
                self.evaluate(last=over)
            elif self.save_due():
                self.save()
            if self.world.shared(stop.signal is not None):
                self.save()
                told = f"stopped at step {trainer.step}; go on with: patchword resume {self.folder}"
                raise Stopped(told, stop.signal or signal.SIGTERM)

    def learn_pace(self, seconds: float) -> None:
        """Keeps back as much of a budget as the end will take: the last evaluations, saving and the report."""
        if not isinstance(self.clock, BudgetClock):
            return
        self.clock.made(seconds)
        rounds = 1 + len(ENDS) if self.config.wise_ft_alpha < 1 else 1  # over the validation part
        held_out = rounds * len(self.trainer.val.source) + len((self.trainer.test or self.trainer.val).source)
        pace = self.pace_of_evaluation(seconds)
        self.clock.reserve = min(0.5 * self.clock.budget, 1.15 * pace * held_out + 1.5 * self.saving + 1.0)
        if self.trainer.step == 1 and self.clock.over(1):
            text = f"The budget is too short: there was time for one step of {seconds:.0f} s. "
            self.tell(Note(f"{text}A smaller model, image size or batch gets further.", "budget_too_short"))

    def tell(self, note: Note) -> None:
        self.notes.append(note)
        for watcher in self.watchers:
            watcher.say(f"note: {note}")

    def pace_of_evaluation(self, step_seconds: float) -> float:
        """Seconds for a picture: as measured, or else a third of what it takes to train on one, and a margin."""
        if self.evaluation_seconds:
            return self.evaluation_seconds
        return 0.5 * step_seconds / self.config.batch_size * (2 if self.config.tta_flip else 1)

    def note_step(self, made: dict[str, float | None], seconds: float) -> None:
        step, self.step_seconds = self.trainer.step, seconds
        speed = {"images_per_second": round(self.config.batch_size / seconds, 1)}
        row = {"kind": "train", **self.place(), **made, **self.timing(), **speed}
        if step <= EARLY or step % EVERY == 0:
            self.note(row)
            return
        progress, left = self.clock.progress(step), self.clock.left(step, seconds)
        for watcher in self.watchers:
            watcher.tick(row, progress, left)

    def place(self) -> dict[str, Any]:
        return {"step": self.trainer.step, "epoch": round(self.trainer.epoch, 6)}

    def timing(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 3)}

    def note(self, row: dict[str, Any]) -> None:
        if not self.world.first:
            return
        self.metrics.add(row)
        left = self.clock.left(self.trainer.step, self.step_seconds)
        for watcher in self.watchers:
            watcher.row(row, self.clock.progress(self.trainer.step), left)

    def evaluation_due(self) -> bool:
        every = max(1, round(self.config.eval_every * len(self.parts.train) / self.config.batch_size))
        if isinstance(self.clock, StepClock):
            every = max(every, self.clock.steps // MOST_EVALUATIONS)
        due = self.trainer.step % every == 0
        if due and isinstance(self.clock, BudgetClock):
            cost = self.pace_of_evaluation(self.clock.longest) * len(self.trainer.val.source)
            late = self.seconds - self.evaluated_at >= self.clock.budget / MOST_EVALUATIONS
            due = late and self.evaluating + cost <= EVALUATION_SHARE * self.seconds and not self.clock.over(1, cost)
        return bool(self.world.shared(due))

    def evaluate(self, last: bool) -> None:
        start = self.now()
        answers = self.asked(self.trainer.evaluated)
        if not np.isfinite(answers.logits).all():
            raise TrainingError(
                f"After step {self.trainer.step} the validation logits contain NaN or Inf although the training loss "
                "was finite. The last checkpoint is kept. A lower learning rate (--optim.lr) or fp32 usually helps.",
                code="not_finite",
            )
        took = self.now() - start
        self.evaluating, self.evaluated_at = self.evaluating + took, self.seconds
        self.evaluation_seconds = took / len(self.trainer.val.source)
        told = None
        if last and self.config.wise_ft_alpha < 1:
            answers, told = self.choose_share(answers)
        row = {"kind": "val", **self.place(), **answers.figures(), **self.timing()}
        better = self.best is None or merit(row) > merit(self.best)
        self.note(row)
        if better:
            self.best = {name: value for name, value in row.items() if name != "seconds"}
            self.best["temperature"] = round(answers.temperature(), 4)
            if told:  # if not, the mixture of an earlier step is kept
                self.tell(told)
        if better or last or self.save_due():
            self.save()

    def asked(self, model: nn.Module) -> Answers:
        return ask(model, self.trainer.val, flip=self.config.tta_flip, world=self.world)

    def choose_share(self, answers: Answers) -> tuple[Answers, Note | None]:
        """Where pictures are unlike all that the weights have seen before, half way is worse than either end: the best
        of the three stands for the last step, and a note where that is not the mixture.
        """
        average, usual = self.trainer.average, 1 - self.config.wise_ft_alpha
        assert average is not None
        found = {usual: answers} | {share: self.asked(average.mixed(share)) for share in ENDS}
        losses = {share: each.figures()["nll"] for share, each in found.items()}
        share = min(losses, key=losses.__getitem__)
        if share == usual:
            return answers, None
        average.model = average.mixed(share)
        text = f"{ENDS[share]} have a validation loss of {losses[share]:.4f}, their interpolation (wise_ft_alpha "
        text += f"{self.config.wise_ft_alpha:g}) {losses[usual]:.4f}: the former are kept."
        return found[share], Note(text, "interpolation_not_kept")

    def save_due(self) -> bool:
        """By time: as configured, and twenty times in a budget, which a kill would else use up, if saving is quick."""
        every = self.config.save_every
        if self.config.budget is not None:
            every = min(every, max(self.config.budget / 20, 50 * self.saving))
        return bool(self.world.shared(self.now() - self.saved_at >= every))

    def save(self) -> None:
        start = self.now()
        if self.world.first:
            length = self.metrics.sync()
            notes: dict[str, Any] = {"told": [note.to_json() for note in self.notes]}
            if isinstance(self.clock, BudgetClock):
                notes["begun"] = self.clock.begun
            snapshot = Snapshot(self.trainer.step, self.seconds, length, self.best, self.trainer.state(), notes)
            self.store.save(snapshot, self.trainer.checkpoint(self.provenance()))
        self.world.barrier()
        self.saved_at = self.now()
        self.saving = self.saved_at - start

    def provenance(self) -> dict[str, Any]:
        return {"run": self.config.name, "data": self.config.data.source, "seed": self.config.seed, **self.place()}

    def stop_at_fault(self, fault: Fault, batch: dict[str, Any]) -> None:
        """Saves the state before the step, keeps the cause, and says what to do."""
        self.save()
        found = self.world.gathered((fault, batch))  # the process whose share is to blame knows the place
        fault, batch = next((f for f in found if f[0].place), found[0])
        told = None
        if self.world.first:
            raw = self.trainer.checkpoint(self.provenance(), raw=True)
            told = write_fault(self.folder, fault, raw, batch, self.trainer.objective.weights)
        told = self.world.shared(told)
        where = f"{fault.place.where}, {fault.place.layer}" if fault.place else "nowhere when it is computed again"
        names = ", ".join(fault.samples[:3]) + (f" and {len(fault.samples) - 3} more" if len(fault.samples) > 3 else "")
        raise TrainingError(
            f"Step {fault.step + 1} met a number that is not finite ({where}) in the batch {names}. The step was not "
            f"made; the state before it is saved in {self.store.path(fault.step)}, the cause in {told}. A lower "
            f"learning rate (--optim.lr), gradient clipping (--optim.clip-grad-norm 1) or fp32 usually helps.",
            code="not_finite",
        )


def merit(row: dict[str, Any]) -> tuple[float, float]:
    """What the best checkpoint is best at, on validation: accuracy, then loss."""
    return row.get("top1", row.get("map", 0.0)), -row["nll"]
