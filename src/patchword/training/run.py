"""A training run from its first step, or a checkpoint, to the published model, in one process or many.

A run can be killed at any time: it continues from its last checkpoint, and with a fixed number of steps its result is
bit-identical to that of an uninterrupted run. `start_run.py` makes runs and continues them.
"""

import platform
import signal
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..checkpoints.checkpoint import Checkpoint
from ..config import Config
from ..config.config_checks import config_notes
from ..core.runtime import StopSignal, machine_info
from ..data.loader import Loader
from ..data.sources import DatasetSplits
from ..errors import Note, Stopped, TrainingError
from ..models import build_model, optimize_for_cpu
from ..report import TrainingReport, write_training_report
from .allocator import retain_freed_memory, return_freed_memory
from .budget_clock import BudgetClock, StepClock
from .callbacks import Callback, LogRow, RunInfo, TrainResult
from .checkpointing import CheckpointStore, LoadedCheckpoint, Snapshot, read_training_checkpoint
from .distributed import ProcessGroup
from .evaluator import EvalOutputs, evaluate_sharded, evaluate_split
from .nan_guard import Fault, write_fault
from .pacing import Pacing, make_clock
from .precision import autocast
from .report_content import classification_results, unreadable_images, unreadable_notes
from .run_dir import (
    MetricsLog,
    elapsed_seconds,
    publish_model,
    read_split,
    remove_leftovers,
    update_config,
    write_split,
)
from .selection import ENDPOINTS, is_better, select_interpolation
from .trainer import NonFiniteStepError, Trainer

FIRST_LOGGED, LOG_EVERY = 10, 10  # the first ten steps get a row in metrics.jsonl, then every tenth


@dataclass(frozen=True)
class Decision:
    """What comes after a step: `progress` is the completed fraction of the run."""

    progress: float
    is_over: bool
    is_eval_due: bool
    is_save_due: bool
    is_stopped: bool


class Run:
    """One process of a run.

    Args:
        run_dir: The run directory. If it has a checkpoint, the run continues from there.
        config: The configuration; `self.config` also has the resolved architecture.
        splits: The data.
        group: The processes of the run.
        callbacks: Called in the main process only.
        started: `now()` when the budget began.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        splits: DatasetSplits,
        group: ProcessGroup,
        callbacks: tuple[Callback, ...],
        started: float,
        now: Callable[[], float],
    ) -> None:
        (return_freed_memory if group.shards(config) else retain_freed_memory)()
        self.run_dir, self.splits, self.group, self.started, self.now = run_dir, splits, group, started, now
        self.callbacks = callbacks if group.is_main else ()
        self.store = CheckpointStore(run_dir, config.keep_last, group if group.shards(config) else None)
        loaded = self.store.load()
        self.trainer = Trainer(config, splits, group, fresh=loaded is None, now=now)
        self.config = self.trainer.config
        self.spent = elapsed_seconds(run_dir)  # by earlier processes
        self.best: LogRow | None = None
        self.metrics_bytes = 0
        self.notes = [*config_notes(self.config), *self.trainer.notes]
        if loaded is not None:
            self.restore(loaded)
        self.resumed_step = self.trainer.step
        self.clock = make_clock(self.config, len(splits.train), self.spent, started, now)
        if loaded is not None and isinstance(self.clock, BudgetClock):
            self.clock.first_step_at = loaded.snapshot.first_step_at
        self.num_images = {name: len(source) for name, source in splits.as_dict().items()}
        num_final_rounds = 1 + len(ENDPOINTS) if self.config.wise_ft_alpha < 1 else 1
        self.pacing = Pacing(
            self.config, self.clock, self.num_images, num_final_rounds, self.trainer.seconds_per_image, now
        )
        self.metrics_log: MetricsLog | None = None

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Continue from a checkpoint."""
        snapshot = loaded.snapshot
        if loaded.shards is None:
            self.trainer.restore(snapshot.step, loaded.model, snapshot.tensors)
        else:
            self.trainer.restore_shards(snapshot.step, loaded.shards)
        self.best, self.metrics_bytes = snapshot.best, snapshot.metrics_bytes
        self.spent = max(self.spent, snapshot.seconds)
        self.notes = [*(self.notes if snapshot.notes is None else snapshot.notes), *loaded.notes]

    @property
    def seconds(self) -> float:
        """Training time so far, over all processes that continued one another."""
        return self.spent + self.now() - self.started

    def run(self) -> TrainResult | None:
        """Train, select, publish and report."""
        result = None
        started: list[Callback] = []
        try:
            self.group.run_on_main(self.open_files)
            for callback in self.callbacks:
                callback.on_train_start(self.info())
                started.append(callback)
            with StopSignal() as stop:
                self.train_loop(stop)
            result = self.finish()
            return result
        finally:
            if self.metrics_log is not None:
                self.metrics_log.close()
            self.trainer.close()
            for callback in started:
                callback.on_train_end(result)

    def open_files(self) -> None:
        """Remove leftovers, and open the metrics."""
        self.metrics_log = MetricsLog(self.run_dir, self.metrics_bytes)
        remove_leftovers(self.run_dir)
        self.store.remove_leftovers()
        update_config(self.run_dir, self.config)
        if read_split(self.run_dir) is None:
            write_split(self.run_dir, self.splits.split_info)

    def info(self) -> RunInfo:
        """Describe the run to callbacks."""
        return RunInfo(
            run_dir=self.run_dir,
            config=self.config,
            num_parameters=self.num_parameters,
            num_trainable=sum(p.numel() for p in self.trainer.parameters),
            num_samples=self.num_images,
            num_classes=len(self.trainer.labels),
            total_steps=self.clock.total_steps if isinstance(self.clock, StepClock) else None,
            resumed_step=self.resumed_step,
            notes=tuple(self.notes),
        )

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(p.numel() for p in self.trainer.model.parameters())

    # Training

    def train_loop(self, stop: StopSignal) -> None:
        """Make steps until the run is over, with evaluations and checkpoints in between."""
        trainer = self.trainer
        trainer.start_loader()
        decision = self.decide(stop)
        while not decision.is_over:
            started = self.now()
            try:
                metrics = trainer.train_step(decision.progress)
            except NonFiniteStepError as error:
                self.stop_at_fault(error.fault, error.batch)
            self.after_step(metrics, self.now() - started)
            decision = self.decide(stop)
            if decision.is_over or decision.is_eval_due:
                self.evaluate(is_last=decision.is_over)
            elif decision.is_save_due:
                self.save()
            if decision.is_over or decision.is_eval_due or decision.is_save_due:  # which took a while
                decision = replace(self.decide(stop), is_over=decision.is_over)
            if decision.is_stopped:
                self.save()
                launcher = "patchword" if self.group.size == 1 else "torchrun (options as before) -m patchword"
                message = f"stopped at step {trainer.step}; continue with: {launcher} resume {self.run_dir}"
                raise Stopped(message, stop.signal or signal.SIGTERM)

    def decide(self, stop: StopSignal) -> "Decision":
        """Return what comes next, in one message: the main process's clock decides, and a signal to any process."""
        clock, step, is_main = self.clock, self.trainer.step, self.group.is_main
        own = Decision(
            progress=clock.progress(step) * is_main,
            is_over=is_main and clock.is_over(step),
            is_eval_due=is_main and self.pacing.is_eval_due(step),
            is_save_due=is_main and self.pacing.is_save_due(),
            is_stopped=stop.signal is not None,
        )
        progress, *flags = self.group.sum_numbers([float(value) for value in astuple(own)])
        return Decision(progress, *map(bool, flags))

    def after_step(self, metrics: dict[str, float | None], seconds: float) -> None:
        """Record the time of a step, report it, and log some of the steps."""
        self.pacing.record_step(seconds)
        step = self.trainer.step
        if step == 1 and isinstance(self.clock, BudgetClock) and self.clock.is_over(1):
            text = f"The budget is too short: it allowed one step of {seconds:.0f} s. "
            self.add_note(Note(f"{text}Use a smaller model, image size or batch size.", "budget_too_short"))
        throughput = round(self.config.batch_size / seconds, 1)
        row = {"kind": "train", **self.position(), **metrics, **self.timing(), "images_per_second": throughput}
        progress, seconds_left = self.clock.progress(step), self.clock.seconds_left(step, seconds)
        for callback in self.callbacks:
            callback.on_step(row, progress, seconds_left)
        if step <= FIRST_LOGGED or step % LOG_EVERY == 0:
            self.log(row)

    def position(self) -> dict[str, Any]:
        """Return the current step and epoch."""
        return {"step": self.trainer.step, "epoch": round(self.trainer.epoch, 6)}

    def timing(self) -> dict[str, Any]:
        """Return the training time so far."""
        return {"seconds": round(self.seconds, 3)}

    def log(self, row: LogRow) -> None:
        """Write a row to metrics.jsonl."""
        if self.metrics_log is not None:
            self.metrics_log.append(row)
        for callback in self.callbacks:
            callback.on_log(row)

    def add_note(self, note: Note) -> None:
        """Tell the user something; the report shows it, too."""
        self.notes.append(note)
        for callback in self.callbacks:
            callback.on_message(f"note: {note}")

    # Evaluation and checkpoints

    def evaluate(self, is_last: bool) -> None:
        """Evaluate on the validation set; save if that is the best evaluation, the last, or a save is due."""
        started = self.now()
        outputs = self.evaluate_model(self.trainer.eval_model, self.trainer.val)
        self.group.run_on_main(lambda: self.require_finite(outputs))
        self.pacing.record_evaluation(self.now() - started)
        note = None
        if is_last and self.config.wise_ft_alpha < 1:
            assert self.trainer.ema is not None
            evaluate = partial(self.evaluate_model, loader=self.trainer.val)
            outputs, note = select_interpolation(self.trainer.ema, outputs, evaluate, self.group)
        row, best = self.group.run_on_main(lambda: self.assess(outputs))
        self.log(row)
        if best is not None:
            self.best = best
            if note:  # otherwise the interpolation of an earlier step is published
                self.add_note(note)
        if best is not None or is_last or self.is_save_due():
            self.save()

    def evaluate_model(self, model: nn.Module, loader: Loader) -> EvalOutputs | None:
        """Run a model on a split; only the main process gets the outputs."""
        options: dict[str, Any] = {"tta_flip": self.config.tta_flip, "group": self.group}
        if self.trainer.sharding is None:
            return evaluate_split(model, loader, **options)
        # Of the trained model, weights are gathered in bf16, which only autocast accepts beside images in fp32.
        is_mixed = model is self.trainer.model and self.group.device.type == "cuda"
        with autocast(self.config.precision if is_mixed else "fp32", self.group.device):
            return evaluate_sharded(model, loader, **options)

    def assess(self, outputs: EvalOutputs | None) -> tuple[LogRow, LogRow | None]:
        """Return the row of an evaluation, and what is remembered of it if it is the best so far."""
        assert outputs is not None
        row: LogRow = {"kind": "val", **self.position(), **outputs.metrics(), **self.timing()}
        if not is_better(row, self.best):
            return row, None
        best = {name: value for name, value in row.items() if name != "seconds"}
        return row, {**best, "temperature": round(outputs.temperature(), 4)}

    def require_finite(self, outputs: EvalOutputs | None) -> None:
        """Stop the run if logits are NaN or Inf."""
        assert outputs is not None
        if not np.isfinite(outputs.logits).all():
            raise TrainingError(
                f"After step {self.trainer.step} the validation logits contain NaN or Inf although the training loss "
                "was finite. The last checkpoint is kept. A lower learning rate (--optim.lr) or fp32 usually helps.",
                code="not_finite",
            )

    def is_save_due(self) -> bool:
        """Whether the main process wants to save."""
        return self.group.broadcast(self.pacing.is_save_due())

    def save(self) -> None:
        """Save a checkpoint."""
        started = self.now()
        if self.trainer.sharding is None:
            self.group.run_on_main(self.write_checkpoint)
        else:
            snapshot = self.group.run_on_main(lambda: self.make_snapshot({}))
            model = self.trainer.describe(self.provenance(), {})
            self.store.save_sharded(snapshot, self.trainer.sharded_tensors(), model)
        self.pacing.record_save(started)

    def write_checkpoint(self) -> None:
        """Write the checkpoint of the current step."""
        snapshot = self.make_snapshot(self.trainer.state_tensors())
        self.store.save(snapshot, self.trainer.checkpoint(self.provenance()))

    def make_snapshot(self, tensors: dict[str, Tensor]) -> Snapshot:
        """Describe the state of the run; its metrics are synced to disk first."""
        assert self.metrics_log is not None
        return Snapshot(
            step=self.trainer.step,
            seconds=self.seconds,
            metrics_bytes=self.metrics_log.sync(),
            best=self.best,
            tensors=tensors,
            notes=tuple(self.notes),
            first_step_at=self.clock.first_step_at if isinstance(self.clock, BudgetClock) else None,
        )

    def provenance(self) -> dict[str, Any]:
        """Return which run the current weights come from."""
        return {"run": self.config.name, "data": self.config.data.source, "seed": self.config.seed, **self.position()}

    def stop_at_fault(self, fault: Fault, batch: dict[str, Tensor]) -> None:
        """Save the state before a step that was not finite, save its cause, and raise TrainingError."""
        self.save()
        faults = self.group.all_gather((fault, batch))  # only the process with the bad samples knows the location
        fault, batch = next((pair for pair in faults if pair[0].location), faults[0])
        raw = self.trainer.checkpoint(self.provenance(), raw=True)

        def write() -> Path:
            return write_fault(self.run_dir, fault, raw, batch, self.trainer.objective.weights)

        folder = self.group.run_on_main(write)
        where = str(fault.location) if fault.location else "not reproduced when the step was computed again"
        num_more = len(fault.samples) - 3
        samples = ", ".join(fault.samples[:3]) + (f" and {num_more} more" if num_more > 0 else "")
        raise TrainingError(
            f"Step {fault.step + 1} produced NaN or Inf ({where}) in the batch {samples}. The step was discarded. The "
            f"state before it is saved in {self.store.path(fault.step)}, the cause in {folder}. A lower learning rate "
            "(--optim.lr), gradient clipping (--optim.clip-grad-norm 1) or fp32 usually helps.",
            code="not_finite",
        )

    # The end of the run

    def finish(self) -> TrainResult | None:
        """Evaluate the best model on the test set, publish it, and write the report."""
        if self.best is None:  # the budget was spent before, or the best checkpoint is damaged
            self.evaluate(is_last=True)
        assert self.best is not None
        best = self.best_checkpoint(self.best)
        metrics = {"val": {k: v for k, v in self.best.items() if k not in ("kind", "step", "epoch")}}
        split, loader = ("val", self.trainer.val) if self.trainer.test is None else ("test", self.trainer.test)
        outputs = self.evaluate_model(self.published_model(best), loader)
        temperature = self.best.get("temperature", 1.0)
        if split == "test" and outputs is not None:
            metrics["test"] = {**outputs.metrics(), **outputs.calibration_metrics(temperature)}
            self.log({"kind": "test", **self.position(), **metrics["test"], **self.timing()})
        loaders = {"train": self.trainer.loader, "val": self.trainer.val, "test": self.trainer.test}
        unreadable = unreadable_images(loaders)
        for note in unreadable_notes(unreadable):
            self.add_note(note)
        if outputs is None:
            return None
        provenance = {**best.provenance, **self.origin(), "metrics": metrics}
        results = {**classification_results(loader, outputs), "split": split, "metrics": metrics[split]}
        publish_model(self.run_dir, replace(best, provenance=provenance, temperature=temperature))
        report = write_training_report(self.run_dir, self.make_report(results, provenance))
        return TrainResult(
            run_dir=self.run_dir,
            metrics=metrics,
            best_step=self.best["step"],
            steps=self.trainer.step,
            seconds=self.seconds,
            report=report,
            notes=tuple(self.notes),
            num_unreadable=sum(map(len, unreadable.values())),
        )

    def best_checkpoint(self, best: LogRow) -> Checkpoint:
        """Return the evaluated model of the best step; with sharding, only the main process gets its tensors."""
        current = self.trainer.checkpoint(self.provenance())
        if best["step"] == self.trainer.step:
            return current
        tensors: dict[str, Tensor] = {}

        def read() -> None:
            tensors.update(read_training_checkpoint(self.store.path(best["step"]))[1])

        if self.trainer.sharding is None:
            read()
        else:
            self.group.run_on_main(read)  # raises in all processes if it is damaged
        position = {"step": best["step"], "epoch": best["epoch"]}
        return replace(current, tensors=tensors, provenance={**current.provenance, **position})

    def published_model(self, best: Checkpoint) -> nn.Module:
        """Build the model that is published, shared among the processes if they share the trained one."""
        if self.trainer.sharding is None:
            return optimize_for_cpu(best.build_model()).to(self.group.device)
        if self.group.is_main:
            model = best.build_model()
        else:
            with torch.device("meta"):
                model = build_model(best.config)
        return self.trainer.sharding.shard(optimize_for_cpu(model), trained=False).eval()

    def origin(self) -> dict[str, Any]:
        """Return what is needed to train the same model again."""
        versions = {"patchword": __version__, "torch": torch.__version__, "python": platform.python_version()}
        length = {"seconds": round(self.seconds, 1), "steps": self.trainer.step}
        return {**self.trainer.init_provenance, "versions": versions, **length}

    def make_report(self, results: dict[str, Any], provenance: dict[str, Any]) -> TrainingReport:
        """Return the content of the HTML report."""
        assert self.metrics_log is not None
        return TrainingReport(
            title=self.run_dir.name,
            config=self.config,
            history=self.metrics_log.rows(),
            parameters=self.num_parameters,
            samples=self.num_images,
            notes=tuple(self.notes),
            machine=machine_info(),
            seconds=self.seconds,
            provenance=provenance,
            **results,
        )
