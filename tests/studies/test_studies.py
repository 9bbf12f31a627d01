"""Studies: the grids of runs, an interrupted study that is resumed, and the report."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.command import run
from helpers.model_zoo import VITS, make_checkpoint
from helpers.small_study import BASE, little_study
from patchword.config import DataConfig, OptimConfig, ResNetConfig, ViTConfig
from patchword.data.resolve import open_data
from patchword.errors import ConfigError
from patchword.models import build_model
from patchword.plots.theme import LIGHT, use_theme
from patchword.recipes import load_recipe
from patchword.studies import STUDIES, make_study, run_study
from patchword.studies.runner import training_flops
from patchword.studies.study import Cell, Study
from patchword.studies.study_report import study_figure, write_study
from patchword.training.trainer import Trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_all_cells_can_be_built(name: str) -> None:
    for study in (make_study(name), make_study(name, load_recipe("cifar10_scratch"))):
        assert len({cell.name for cell in study.cells}) == len(study.cells) >= 3
        assert study.question
        assert study.paper
        assert study.axis
        for cell in study.cells:
            build_model(cell.config.model)
            assert "/" not in cell.name


def test_large_images_use_bit_resnets() -> None:
    base = BASE.replace(model=ViTConfig())
    resnets = [c.config.model for c in make_study("compute", base).cells if isinstance(c.config.model, ResNetConfig)]
    assert resnets
    assert all(r.kind == "bit" for r in resnets)


def test_train_fraction_is_stratified_and_keeps_val() -> None:
    full = open_data(DataConfig(source="digits"), seed=1)
    fraction = open_data(DataConfig(source="digits", train_fraction=0.1), seed=1)
    assert fraction.val is not None
    assert full.val is not None
    assert len(fraction.train) == round(0.1 * len(full.train))
    assert len(fraction.val) == len(full.val)
    counts = np.bincount(fraction.train.targets)
    assert len(counts) == 10 and counts.min() >= counts.max() - 3, "stratified by class"
    train_keys = {fraction.train.key(i) for i in range(len(fraction.train))}
    assert train_keys <= {full.train.key(i) for i in range(len(full.train))}
    val_keys = {fraction.val.key(i) for i in range(len(fraction.val))}
    assert not train_keys & val_keys
    with pytest.raises(ConfigError, match=r"train_fraction .*\b0\.0\b"):
        DataConfig(train_fraction=0.0)


class StudyInterruptedError(Exception):
    pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A simulated clock: a training step takes 0.1 s, everything else no time."""
    seconds, train_step = [1000.0], Trainer.train_step

    def timed_step(self: Trainer, progress: float) -> dict[str, float | None]:
        seconds[0] += 0.1
        return train_step(self, progress)

    monkeypatch.setattr(Trainer, "train_step", timed_step)
    return lambda: seconds[0]


@pytest.fixture
def small_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan with 1 s of overhead per run, since these runs are tiny."""
    monkeypatch.setattr("patchword.studies.runner.OVERHEAD_SECONDS", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("small_overhead")
def test_interrupted_study_resumes(tmp_path: Path, clock: Callable[[], float]) -> None:
    study, out = little_study(), tmp_path / "study"

    def stop(text: str) -> None:
        if "(1 of 2)" in text:
            raise StudyInterruptedError

    with pytest.raises(StudyInterruptedError):
        run_study(study, out, budget=18, now=clock, say=stop)
    first = json.loads((out / "results.json").read_text())["rows"]
    assert [row["x"] for row in first] == ["none"]
    modified = (out / "runs/ViT_none_seed0/model.json").stat().st_mtime_ns
    rows = run_study(study, out, budget=18, now=clock)
    assert [row["x"] for row in rows] == ["none", "learned"]
    assert rows[0] == first[0]
    assert (out / "runs/ViT_none_seed0/model.json").stat().st_mtime_ns == modified, "the run was repeated"
    # Of 18 s, measuring two models takes 1.6 s; each run has 8.2 s, of which overhead (1 s) and evaluation (0.26 s).
    assert rows[0]["steps"] == rows[1]["steps"] == 69, "planned once, equal for all runs"
    assert rows[1]["accuracy"] > 0.2
    assert rows[1]["n"] == 359
    write_study(study, rows, out, "2 cores")
    report = (out / "report.html").read_text()
    assert "Do positions matter?" in report
    assert f"{100 * rows[1]['accuracy']:.2f}" in report
    assert {"positions.png", "positions.svg", "positions.npz"} <= {p.name for p in out.iterdir()}
    other = Study("head", "t", "q", "p", "a", study.cells, "steps")
    with pytest.raises(ConfigError, match=r"\bpositions\b.*\bhead\b.*--out") as error:
        run_study(other, out, budget=18, now=clock)
    assert error.value.code == "study_differs"
    changed = [Cell(c.series, c.x, c.config.replace(batch_size=32)) for c in study.cells]
    with pytest.raises(ConfigError, match=r"\(models\).*--out") as error:
        run_study(Study("positions", "t", "q", "p", "a", tuple(changed), "steps"), out, budget=18, now=clock)
    assert error.value.code == "study_differs"


def test_other_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/report.html").write_text("other")
    study = Study("norm", "t", "q", "p", "a", (Cell("ViT", 1.0, BASE),), "steps")
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path / 'other'))} .*--out") as error:
        run_study(study, tmp_path / "other", budget=60)
    assert error.value.code == "not_a_study"
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["report.html"]


def test_budget_for_too_few_steps_is_rejected(tmp_path: Path, clock: Callable[[], float]) -> None:
    study = Study("norm", "t", "q", "p", "a", (Cell("ViT", 1.0, BASE), Cell("ViT", 2.0, BASE)), "steps")
    with pytest.raises(ConfigError, match=r"--budget: .*\b2 runs.*\b30 steps") as error:
        run_study(study, tmp_path / "study", budget=16, now=clock)
    assert error.value.code == "budget_too_short"
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small_overhead")
def test_diverged_run_is_recorded(tmp_path: Path, clock: Callable[[], float]) -> None:
    diverging = BASE.replace(optim=OptimConfig(lr=1e30, clip_grad_norm=0.0))
    study = Study("norm", "t", "q", "p", "a", (Cell("ViT", 1.0, diverging), Cell("ViT", 2.0, BASE)), "steps")
    rows = run_study(study, tmp_path / "study", budget=18, now=clock)
    assert rows[0]["accuracy"] is None
    assert "--optim.lr" in rows[0]["diverged"]
    assert rows[1]["accuracy"] > 0.2
    assert run_study(study, tmp_path / "study", budget=18, now=clock) == rows
    write_study(study, rows, tmp_path / "study", "2 cores")
    assert "diverged" in (tmp_path / "study/report.html").read_text()


@pytest.mark.parametrize("name", ["head", "data-size", "compute"])
def test_tick_labels_are_plain_text(name: str) -> None:
    """The theme disables mathtext, so matplotlib's $10^3$ would be shown literally."""
    study = make_study(name)
    means = [
        {"series": c.series, "x": c.x, "accuracy": 0.5, "spread": None, "tflop": 3.0 + k}
        for k, c in enumerate(study.cells)
    ]
    with use_theme(LIGHT):
        figure = study_figure(study, means)
        figure.draw_without_rendering()
    labels = [
        label.get_text()
        for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis)
        for label in axis.get_ticklabels(which="both")
    ]
    assert any(labels)
    assert not any("$" in text or "{" in text for text in labels)


def test_all_stems_give_the_same_number_of_patches() -> None:
    for recipe in (None, "cifar10_scratch"):
        study = make_study("data-size", load_recipe(recipe)) if recipe else make_study("data-size")
        models = [c.config.model for c in study.cells if isinstance(c.config.model, ViTConfig)]
        assert len({m.num_patches for m in models}) == 1
        assert any(m.stem == "resnet" for m in models)


def test_finetuning_recipe_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^--recipe\b.*\binit\b.*\blora_rank\b.*\bfreeze\b"):
        make_study("positions", load_recipe("cifar10_finetune"))


def test_training_flops_match_manual_count() -> None:
    """Patch embedding, one block and the head."""
    config = VITS["class"].replace(depth=1)
    n, d, m = config.num_patches + 1, config.embed_dim, config.mlp_dim
    patch_dim = 3 * config.patch_size[0] * config.patch_size[1]
    macs = (n - 1) * patch_dim * d + n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * m + d * config.num_classes
    assert training_flops(make_checkpoint(config)) == 3 * 2 * macs


@pytest.mark.slow
def test_invalid_requests_are_rejected(tmp_path: Path) -> None:
    unknown_study = run("study", "color", "--out", tmp_path / "x")
    assert unknown_study.returncode == 2
    assert "data-size" in unknown_study.stderr
    short_budget = run("study", "positions", "--budget", "3s", "--out", tmp_path / "x")
    assert short_budget.returncode == 2
    assert "--budget" in short_budget.stderr
    with pytest.raises(ConfigError, match=r"^--recipe\b.*\bViT\b"):
        make_study("positions", BASE.replace(model=ResNetConfig(image_size=(32, 32), layers=(1, 1, 1), kind="cifar")))
