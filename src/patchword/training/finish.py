"""The end of a run: the best model on validation, measured once on the test part, published and reported."""

import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import __version__
from ..checkpoints.checkpoint import Checkpoint
from ..core.runtime import machine_facts
from ..data.loader import Loader
from ..errors import Note
from ..metrics.classification import average_precision
from ..metrics.per_class import MAX_CONFUSION_CLASSES, confusion_matrix, per_class_metrics
from ..models import optimize_for_cpu
from ..report import Mistake, TrainingReport, write_training_report
from .callbacks import TrainResult
from .checkpointing import read_checkpoint_folder
from .run_dir import publish
from .validation import Answers, ask

if TYPE_CHECKING:
    from .run import Run

SHOWN_MISTAKES = 24


def finish(run: "Run") -> TrainResult | None:
    """Every process measures its share; the first writes model and report."""
    if run.best is None:  # the budget was spent before this process began, or the best checkpoint is damaged
        run.evaluate(last=True)
    assert run.best is not None
    best = best_model(run)
    figures = {"val": {k: v for k, v in run.best.items() if k not in ("kind", "step", "epoch")}}
    part, loader = ("val", run.trainer.val) if run.trainer.test is None else ("test", run.trainer.test)
    model = optimize_for_cpu(best.model()).to(run.world.device)
    answers = ask(model, loader, flip=run.config.tta_flip, world=run.world)
    temperature = run.best.get("temperature", 1.0)
    if part == "test":
        figures["test"] = {**answers.figures(), **answers.calibrated(temperature)}
        run.note({"kind": "test", **run.place(), **figures["test"], **run.timing()})
    for note in unreadable_notes(run):
        run.tell(note)
    if not run.world.first:
        return None
    provenance = {**best.provenance, **origin(run), "metrics": figures}
    content = make_report(run, part, loader, answers, figures, provenance)
    publish(run.folder, replace(best, provenance=provenance, temperature=temperature))
    path = write_training_report(run.folder, content)
    return TrainResult(
        run.folder, figures, run.best["step"], run.trainer.step, run.seconds, path, tuple(run.notes),
        unreadable=sum(map(len, unreadable_images(run).values())),
    )  # fmt: skip


def best_model(run: "Run") -> Checkpoint:
    """The evaluated model of the best step."""
    assert run.best is not None
    present = run.trainer.checkpoint(run.provenance())
    if run.best["step"] == run.trainer.step:
        return present
    _, tensors = read_checkpoint_folder(run.store.path(run.best["step"]))
    place = {"step": run.best["step"], "epoch": run.best["epoch"]}
    return Checkpoint(**{**vars(present), "tensors": tensors, "provenance": {**present.provenance, **place}})


def origin(run: "Run") -> dict[str, Any]:
    """What is needed to make the same model again."""
    versions = {"patchword": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**run.trainer.history, "versions": versions, "seconds": round(run.seconds, 1), "steps": run.trainer.step}


def unreadable_images(run: "Run") -> dict[str, list[str]]:
    """For each split that has images which could not be read, the reasons."""
    loaders = {"train": run.trainer.loader, "val": run.trainer.val, "test": run.trainer.test}
    found = {name: list(loader.unreadable.values()) for name, loader in loaders.items() if loader is not None}
    return {name: reasons for name, reasons in found.items() if reasons}


def unreadable_notes(run: "Run") -> list[Note]:
    notes = []
    for name, reasons in unreadable_images(run).items():
        were = "image was" if len(reasons) == 1 else "images were"
        text = f"{len(reasons)} {were} left out of the {name} split: could not be read. {'; '.join(reasons[:10])}"
        notes.append(Note(text, "images_unreadable"))
    return notes


def make_report(
    run: "Run",
    part: str,
    loader: Loader,
    answers: Answers,
    figures: dict[str, dict[str, Any]],
    provenance: dict[str, Any],
) -> TrainingReport:
    labels = run.trainer.labels
    single = answers.targets.ndim == 1
    said = answers.logits.argmax(axis=1)
    few = single and len(labels) <= MAX_CONFUSION_CLASSES
    matrix = confusion_matrix(answers.targets, said, len(labels)) if few else None
    return TrainingReport(
        title=run.folder.name,
        config=run.config,
        history=run.metrics.rows(),
        labels=labels,
        split=part,
        metrics=figures[part],
        confusion=matrix,
        per_class=() if few else recalls(answers, said, labels) if single else precisions(answers, labels),
        mistakes=tuple(mistakes(loader, answers)) if single else (),
        parameters=sum(p.numel() for p in run.trainer.model.parameters()),
        samples={name: len(each) for name, each in run.parts.present().items()},
        notes=tuple(run.notes),
        machine=machine_facts(),
        seconds=run.seconds,
        provenance=provenance,
    )


def recalls(answers: Answers, said: np.ndarray, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    """How many pictures of each class there are, and which part of them was recognised."""
    found = per_class_metrics(answers.targets, said, len(labels))
    columns = zip(labels, found.support.tolist(), found.recall.tolist(), strict=True)
    return [{"label": label, "n": n, "top1": recall} for label, n, recall in columns if n]


def precisions(answers: Answers, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    """Average precision of each class that occurs, where labels are several."""
    columns = zip(labels, answers.logits.T, answers.targets.T, strict=True)
    return [
        {"label": label, "n": int(true.sum()), "ap": average_precision(scores, true)}
        for label, scores, true in columns
        if true.any()
    ]


def mistakes(loader: Loader, answers: Answers) -> list[Mistake]:
    """Those pictures that the model was most wrong about, as it saw them."""
    logits = torch.from_numpy(answers.logits).double()
    log_probabilities = logits.log_softmax(dim=1).numpy()
    predicted, rows = answers.logits.argmax(axis=1), np.arange(len(answers.targets))
    losses = -log_probabilities[rows, answers.targets]
    wrong = np.flatnonzero(predicted != answers.targets)
    labels, shown = loader.source.labels, []
    for row in wrong[np.argsort(-losses[wrong], kind="stable")][:SHOWN_MISTAKES]:
        index = int(answers.indices[row])
        image = loader.preprocess.pixels(loader.source.read(index, mode=loader.preprocess.mode))
        true, said = labels[answers.targets[row]], labels[predicted[row]]
        probability = float(np.exp(log_probabilities[row, predicted[row]]))
        shown.append(Mistake(loader.source.name(index), image, true, said, probability, float(losses[row])))
    return shown
