"""The study of a GAN of Transformers: does it draw digits that a classifier recognizes, and what does it need?"""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..config import AugmentConfig, Config, DataConfig, OptimConfig, ResNetConfig
from ..data.resolve import open_data
from ..data.sources import ArraySource, Source
from ..inference.classifier import Classifier
from ..lineage.gan import GanConfig, Generator, from_pixels, make_discriminator, to_pixels
from ..lineage.gan_fit import GanTrainer, fit_gan, frechet_distance, nearest_distances
from ..plots.panel import Panel
from ..training import train
from .study import Cell, Length, ResultRow, Study
from .study_report import average_over_seeds, result_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[ResultRow]
RECOGNIZED = 0.9  # confidence of the classifier from which on a sample counts as a digit
NUM_WATCHED = 8  # measurements after the first
SHOWN, NUM_SHOWN = (0, 1, 2, 4, 8), 30  # measurements whose samples are kept for the figure, and how many of them
WARMUP_STEPS, TIMED_STEPS = 4, 12
SETUP_SECONDS = 0.5  # of a run, before its first step
NUM_HALVES = 5  # pairs of random halves of the real digits, whose mean distance is the floor

# Mixed images in training make the classifier less sure of what is not a digit: it recognizes 29% of the means of two
# digits, and 95% of unseen digits; trained without mixed images, 53% and 97%.
JUDGE = Config(
    data=DataConfig(source="digits"),
    model=ResNetConfig(image_size=(8, 8), in_channels=1, layers=(1, 1, 1), kind="cifar"),
    augment=AugmentConfig(crop="shift", shift_limit=0.125, cutout=0.25, mixup=0.5, cutmix=1.0),
    optim=OptimConfig(lr=2e-3, weight_decay=0.05),
    batch_size=64, steps=1000, eval_every=1e9,
)  # fmt: skip


class Verdict(NamedTuple):
    """What the classifier says about images."""

    confidence: Tensor  # (B,)
    labels: Tensor  # (B,)
    features: Tensor  # (B, D), the input of its last layer

    @property
    def recognized(self) -> Tensor:
        """Which images are recognized (B,)."""
        return self.confidence > RECOGNIZED

    def fraction(self) -> float:
        """The fraction of images that are recognized."""
        return sum(self.counts()) / len(self.labels)

    def counts(self) -> list[int]:
        """The number of recognized images of each class."""
        return torch.bincount(self.labels[self.recognized], minlength=10).tolist()


@dataclass(frozen=True)
class Judge:
    """A classifier that has never seen a generated image, and the real digits.

    Attributes:
        classifier: A small ResNet, trained on the training set.
        train: The digits that the GAN sees, uint8 (N, 8, 8, 1).
        test: Digits that neither the GAN nor the classifier has seen.
    """

    classifier: Classifier
    train: Tensor
    test: Tensor

    @classmethod
    @functools.cache  # all runs of a process share it: it is the same each time
    def load(cls) -> Self:
        """Train the classifier, which takes some seconds."""
        splits = open_data(JUDGE.data, seed=JUDGE.seed)
        assert splits.test is not None
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder, "digits")
            train(JUDGE, run_dir)
            return cls(Classifier.load(run_dir), stack_pixels(splits.train), stack_pixels(splits.test))

    def __call__(self, pixels: Tensor) -> Verdict:
        """Classify pixels, uint8 (B, 8, 8, 1)."""
        with torch.inference_mode():
            probabilities = self.classifier.probabilities(self.classifier.logits(pixels))
            features = self.classifier.model.embed_images(self.classifier.preprocess.normalize(pixels))
            return Verdict(*probabilities.max(dim=1), features)

    def floor(self) -> float:
        """Frechet distance of two halves of the real digits, about what a perfect generator would reach."""
        features, half = self(self.train).features, len(self.train) // 2
        orders = [torch.randperm(len(features), generator=torch.Generator().manual_seed(i)) for i in range(NUM_HALVES)]
        return sum(frechet_distance(features[o[:half]], features[o[half:]]) for o in orders) / NUM_HALVES


def stack_pixels(source: Source) -> Tensor:
    """All images of a source in memory."""
    assert isinstance(source, ArraySource)
    return torch.from_numpy(source.images)


@dataclass
class Progress:
    """What is measured while a GAN is trained, by the number of steps; keys are strings, as in JSON."""

    judge: Judge
    frechet: dict[str, float] = field(default_factory=dict)
    recognized: dict[str, float] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.real_features = self.judge(self.judge.train).features

    def __call__(self, steps: int, images: Tensor) -> None:
        """Measure samples."""
        pixels = to_pixels(images)
        verdict = self.judge(pixels)
        if len(self.frechet) in SHOWN:
            self.samples[str(steps)] = pixels[:NUM_SHOWN, ..., 0].tolist()
        self.frechet[str(steps)] = frechet_distance(self.real_features, verdict.features)
        self.recognized[str(steps)] = verdict.fraction()


@dataclass(frozen=True)
class GanRun:
    """The training of a GAN, as a cell of a study."""

    config: GanConfig

    def to_json(self) -> dict[str, Any]:
        """The config, under a name of its own."""
        return {"gan": self.config.to_json()}

    def time_step(self, now: Callable[[], float]) -> tuple[float, float]:
        """Measure a training step, and the measurements of a run."""
        judge = Judge.load()
        trainer = GanTrainer(self.config, from_pixels(judge.train), seed=0)
        for _ in range(WARMUP_STEPS):
            trainer.step(0.5)
        start = now()
        for _ in range(TIMED_STEPS):
            trainer.step(0.5)
        step_seconds, start = (now() - start) / TIMED_STEPS, now()
        Progress(judge)(0, trainer.samples())
        return step_seconds, SETUP_SECONDS + (NUM_WATCHED + 1) * (now() - start)

    def run(self, seed: int, length: Length, now: Callable[[], float]) -> dict[str, Any]:
        """Train the GAN, and measure its samples on the way and at the end."""
        judge = Judge.load()
        progress = Progress(judge)
        result = fit_gan(
            self.config, from_pixels(judge.train), seed, length.steps, length.seconds, now, progress, NUM_WATCHED
        )
        details = {"frechet": progress.frechet, "recognized": progress.recognized, "floor": judge.floor()}
        details |= compare_to_real(judge, result.samples)
        if seed == 0:
            details |= {"samples": progress.samples, "real_samples": judge.test[:NUM_SHOWN, ..., 0].tolist()}
        networks = Generator(self.config), make_discriminator(self.config)
        return {
            "accuracy": progress.recognized[str(result.steps)],
            "n": len(result.samples),
            "steps": result.steps,
            "seconds": result.seconds,
            "parameters": sum(parameter.numel() for network in networks for parameter in network.parameters()),
            "details": details,
        }


def compare_to_real(judge: Judge, images: Tensor) -> dict[str, Any]:
    """Compare samples with digits that neither network has seen: recognized, classes, distance to training images.

    A GAN that had memorized the training images would have samples much nearer to them than unseen digits are.
    """
    verdict, real = judge(to_pixels(images)), judge(judge.test)
    nearest, nearest_real = (nearest_distances(x, from_pixels(judge.train)) for x in (images, from_pixels(judge.test)))
    return {
        "real_recognized": real.fraction(),
        "counts": verdict.counts(),
        "real_counts": real.counts(),
        "balance": balance(verdict.counts()),
        "nearest": float(nearest.median()),
        "nearest_real": float(nearest_real.median()),
        "nearest_min": float(nearest.min()),
        "nearest_real_min": float(nearest_real.min()),
    }


def balance(counts: list[int]) -> float:
    """Entropy of the classes over its largest value: 1 if all are equally frequent, 0 if there is only one."""
    fractions = [count / max(1, sum(counts)) for count in counts]
    return -sum(p * math.log(p) for p in fractions if p) / math.log(len(counts)) + 0.0  # not -0.0


def gan() -> Study:
    """Train a small TransGAN on the digits, also without penalty, without augmentation, and with smaller patches."""
    full = GanConfig()
    variants = {
        "TransGAN": full,
        "without penalty": full.replace(penalty=0.0),
        "without augmentation": full.replace(shift=0),
        "patches of 2x2 in D": full.replace(patch_size=2),
    }
    cells = tuple(Cell("digits", name, GanRun(config)) for name, config in variants.items())
    return Study(
        "gan", "Can two Transformers make a GAN?",
        "A generator and a discriminator without convolutions learn to draw handwritten digits of 8 x 8 pixels. A "
        "classifier that has seen real digits only judges 1,000 samples.",
        "TransGAN reached a Frechet distance of 9.26 on CIFAR-10, on par with GANs of convolutions, and needed data "
        "augmentation more than they do (Jiang et al., 2021).",
        "GAN", cells, "steps", min_steps=500,
        measured=f"samples that a classifier recognizes with a confidence above {RECOGNIZED:g}",
        panels=gan_panels,
        limits="The classifier is sure of some images that are not digits, and of a generator that draws one digit "
        "only: the recognized fraction means something only beside the Frechet distance and the counts of classes. "
        "That distance is measured in the features of this classifier, and cannot be compared with those of papers.",
    )  # fmt: skip


def gan_panels(study: Study, rows: Rows) -> list[Panel]:
    """Frechet distance and recognized fraction by step, and samples."""
    finished = [row for row in rows if "details" in row]
    if not finished:
        return [Panel.absent(study.name, study.title, "No run finished.")]
    lines = [
        f"{row['x']}: {row['accuracy']:.0%} recognized, Frechet distance {last(row['details']['frechet']):.1f}"
        for row in finished if row["seed"] == 0
    ]  # fmt: skip
    real = finished[0]["details"]
    summary = f"{'; '.join(lines)} (real digits: {real['real_recognized']:.0%}, {real['floor']:.1f}). Seed 0."
    curves = Panel(
        study.name, "Samples on the way to digits", summary, f"The paper: {study.paper}",
        partial(curves_figure, study, finished),
        {"frechet": np.array([list(row["details"]["frechet"].values()) for row in finished])},
        measures_table(study, rows),
    )  # fmt: skip
    shown = [row for row in finished if "samples" in row["details"]]
    if not shown:
        return [curves]
    first = shown[0]["details"]
    samples = Panel(
        f"{study.name}_samples", "Samples by the number of steps",
        "Always of the same noise, so each digit can be followed from left to right; real digits beside them. Distance "
        f"to the nearest training image, median of {shown[0]['x']}: {first['nearest']:.2f}; of digits that it has not "
        f"seen: {first['nearest_real']:.2f}; of a copy it would be 0.",
        draw=partial(samples_figure, shown),
    )  # fmt: skip
    return [curves, samples]


def last(by_step: dict[str, float]) -> float:
    """The value at the last step."""
    return by_step[max(by_step, key=int)]


def measures_table(study: Study, rows: Rows) -> tuple[tuple[str, ...], ...]:
    """The table of results, with a column for each measure of the samples."""
    header, *lines = result_table(study, average_over_seeds(study, rows))
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "Frechet": lambda details: last(details["frechet"]),
        "Frechet, real": lambda details: details["floor"],
        "balance of classes": lambda details: details["balance"],
        "distance to training": lambda details: details["nearest"],
        "distance, real": lambda details: details["nearest_real"],
    }
    table = [(*header, *measures)]
    for line in lines:
        details = [row["details"] for row in rows if str(row["x"]) == line[1] and "details" in row]
        table.append(
            (*line, *(f"{np.mean([f(d) for d in details]):.2f}" if details else "" for f in measures.values()))
        )
    return tuple(table)


def curves_figure(study: Study, rows: Rows) -> "Figure":
    """Two plots over the steps, with a dashed line for real digits."""
    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(11.0, 4.2)
    distance, recognized = figure.subplots(1, 2)
    style_axes(distance, "Frechet distance", "steps", "distance to real digits")
    style_axes(recognized, "Recognized samples", "steps", f"confidence above {RECOGNIZED:g}")
    for axes, key, real in ((distance, "frechet", "floor"), (recognized, "recognized", "real_recognized")):
        for color, cell in zip(current_theme().series, study.cells, strict=False):
            draw_curve(axes, [row["details"][key] for row in rows if row["cell"] == cell.name], color, str(cell.x))
        level = float(np.mean([row["details"][real] for row in rows]))
        axes.axhline(level, color=current_theme().muted, linestyle="--", linewidth=1.5, label="real digits")
    distance.set_yscale("log")
    distance.yaxis.set_major_formatter("{x:g}")  # powers would need math text
    recognized.set_ylim(0, 1.02)
    recognized.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    recognized.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_curve(axes: "Axes", curves: list[dict[str, float]], color: str, label: str) -> None:
    """Draw the mean over seeds, with their range."""
    if not curves:
        return
    steps = np.mean([[int(step) for step in curve] for curve in curves], axis=0)
    values = np.array([list(curve.values()) for curve in curves])
    axes.plot(steps, values.mean(axis=0), color=color, marker="o", markersize=4, linewidth=2, label=label)
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)


def samples_figure(rows: Rows) -> "Figure":
    """A row of mosaics for each GAN: samples at several steps, then real digits."""
    from ..plots.theme import hide_axes, mosaic, new_figure, show_image

    columns = len(rows[0]["details"]["samples"]) + 1
    figure = new_figure(1.9 * columns, 2.5 * len(rows))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(grid, rows, strict=True):
        samples = {f"{int(step):,} steps": images for step, images in row["details"]["samples"].items()}
        samples["real"] = row["details"]["real_samples"]
        for axes, (title, images) in zip(line, samples.items(), strict=True):
            show_image(hide_axes(axes, title, 10.0), mosaic(np.array(images), columns=5), cmap="gray", vmin=0, vmax=255)
        name = {"rotation": 90, "ha": "right", "va": "center", "transform": line[0].transAxes}
        line[0].text(-0.05, 0.5, str(row["x"]), **name)
    return figure
