"""The paper's experiments in small: their grids, and a real one from start to end, stopped in between."""

import json
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


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_of_every_study_can_be_built(name: str) -> None:
    for base in (make_study(name), make_study(name, load_recipe("cifar10_scratch"))):
        assert len({cell.name for cell in base.cells}) == len(base.cells) >= 3
        assert base.question
        assert base.paper
        assert base.axis
        for cell in base.cells:
            build_model(cell.config.model)
            assert "/" not in cell.name


def test_families_of_a_large_image_are_large() -> None:
    base = BASE.replace(model=ViTConfig())
    resnets = [c.config.model for c in make_study("compute", base).cells if isinstance(c.config.model, ResNetConfig)]
    assert resnets
    assert all(r.kind == "bit" for r in resnets)


def test_fewer_pictures_to_learn_from() -> None:
    whole = open_data(DataConfig(source="digits"), seed=1)
    part = open_data(DataConfig(source="digits", train_fraction=0.1), seed=1)
    assert part.val is not None
    assert whole.val is not None
    assert len(part.train) == round(0.1 * len(whole.train))
    assert len(part.val) == len(whole.val)
    counts = np.bincount(part.train.targets)
    assert len(counts) == 10 and counts.min() >= counts.max() - 3, "about as many of each class"
    kept = {part.train.key(i) for i in range(len(part.train))}
    assert kept <= {whole.train.key(i) for i in range(len(whole.train))}
    held = {part.val.key(i) for i in range(len(part.val))}
    assert not kept & held
    with pytest.raises(ConfigError, match="train_fraction"):
        DataConfig(train_fraction=0.0)


class StudyInterruptedError(Exception):
    pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Simulated seconds: a step takes a tenth of one, whatever the machine; all else takes no time."""
    seconds, train_step = [1000.0], Trainer.train_step

    def slow(self: Trainer, progress: float) -> dict[str, float | None]:
        seconds[0] += 0.1
        return train_step(self, progress)

    monkeypatch.setattr(Trainer, "train_step", slow)
    return lambda: seconds[0]


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs begin and end at once, on digits."""
    monkeypatch.setattr("patchword.studies.runner.OVERHEAD_SECONDS", 1.0)


@pytest.mark.usefixtures("quick_start")
def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path, clock: Callable[[], float]) -> None:
    study, out = little_study(), tmp_path / "study"

    def stop(text: str) -> None:
        if "(1 of 2)" in text:
            raise StudyInterruptedError

    with pytest.raises(StudyInterruptedError):
        run_study(study, out, budget=18, now=clock, say=stop)
    first = json.loads((out / "results.json").read_text())["rows"]
    assert [row["x"] for row in first] == ["none"]
    stamp = (out / "runs/ViT_none_seed0/model.json").stat().st_mtime_ns
    rows = run_study(study, out, budget=18, now=clock)
    assert [row["x"] for row in rows] == ["none", "learned"]
    assert rows[0] == first[0]
    assert (out / "runs/ViT_none_seed0/model.json").stat().st_mtime_ns == stamp, "it was not run again"
    # Of 18 seconds 1.6 are spent on trials; each half of the rest has a start (1 s) and an evaluation (0.26 s).
    assert rows[0]["steps"] == rows[1]["steps"] == 69, "as many steps for both, laid down at the beginning"
    assert rows[1]["accuracy"] > 0.2
    assert rows[1]["n"] == 359
    write_study(study, rows, out, "2 cores")
    page = (out / "report.html").read_text()
    assert "Do positions matter?" in page
    assert f"{100 * rows[1]['accuracy']:.2f}" in page
    assert {"positions.png", "positions.svg", "positions.npz"} <= {p.name for p in out.iterdir()}
    other = Study("head", "t", "q", "p", "a", study.cells, "steps")
    with pytest.raises(ConfigError, match="holds another study"):
        run_study(other, out, budget=18, now=clock)
    changed = [Cell(c.series, c.x, c.config.replace(batch_size=32)) for c in study.cells]
    with pytest.raises(ConfigError, match="models"):
        run_study(Study("positions", "t", "q", "p", "a", tuple(changed), "steps"), out, budget=18, now=clock)


def test_what_is_not_a_study_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.html").write_text("mine")
    study = Study("norm", "t", "q", "p", "a", (Cell("ViT", 1.0, BASE),), "steps")
    with pytest.raises(ConfigError, match="is not a study"):
        run_study(study, tmp_path / "mine", budget=60)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["report.html"]


def test_a_budget_that_shows_nothing_is_refused(tmp_path: Path, clock: Callable[[], float]) -> None:
    study = Study("norm", "t", "q", "p", "a", (Cell("ViT", 1.0, BASE), Cell("ViT", 2.0, BASE)), "steps")
    with pytest.raises(ConfigError, match="steps for each of 2 runs, which is too few to compare"):
        run_study(study, tmp_path / "study", budget=16, now=clock)
    assert not (tmp_path / "study").exists()


@pytest.mark.usefixtures("quick_start")
def test_a_run_that_diverges_is_an_answer(tmp_path: Path, clock: Callable[[], float]) -> None:
    wild = BASE.replace(optim=OptimConfig(lr=1e30, clip_grad_norm=0.0))
    study = Study("norm", "t", "q", "p", "a", (Cell("ViT", 1.0, wild), Cell("ViT", 2.0, BASE)), "steps")
    rows = run_study(study, tmp_path / "study", budget=18, now=clock)
    assert rows[0]["accuracy"] is None
    assert "NaN or Inf" in rows[0]["diverged"]
    assert rows[1]["accuracy"] > 0.2
    assert run_study(study, tmp_path / "study", budget=18, now=clock) == rows
    write_study(study, rows, tmp_path / "study", "2 cores")
    assert "diverged" in (tmp_path / "study/report.html").read_text()


@pytest.mark.parametrize("name", ["head", "data-size", "compute"])
def test_ticks_are_plain_numbers(name: str) -> None:
    """The theme shows text as it is, and so would show matplotlib's formulas for powers of ten."""
    study = make_study(name)
    means = [
        {"series": c.series, "x": c.x, "accuracy": 0.5, "spread": None, "tflop": 3.0 + k}
        for k, c in enumerate(study.cells)
    ]
    with use_theme(LIGHT):
        figure = study_figure(study, means)
        figure.draw_without_rendering()
    said = [
        label.get_text()
        for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis)
        for label in axis.get_ticklabels(which="both")
    ]
    assert any(said)
    assert not any("$" in text or "{" in text for text in said)


def test_the_same_tokens_whatever_stands_before_them() -> None:
    for recipe in (None, "cifar10_scratch"):
        study = make_study("data-size", load_recipe(recipe)) if recipe else make_study("data-size")
        models = [c.config.model for c in study.cells if isinstance(c.config.model, ViTConfig)]
        assert len({m.num_patches for m in models}) == 1
        assert any(m.stem == "resnet" for m in models)


def test_recipes_that_no_study_can_change() -> None:
    with pytest.raises(ConfigError, match="without init"):
        make_study("positions", load_recipe("cifar10_finetune"))


def test_operations_are_counted() -> None:
    """A patch embedding, a block and a head by hand."""
    config = VITS["class"].replace(depth=1)
    n, d, m = config.num_patches + 1, config.embed_dim, config.mlp_dim
    patch = 3 * config.patch_size[0] * config.patch_size[1]
    products = (n - 1) * patch * d + n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * m + d * config.num_classes
    assert training_flops(make_checkpoint(config)) == 3 * 2 * products


def test_wrong_requests(tmp_path: Path) -> None:
    result = run("study", "color", "--out", tmp_path / "x")
    assert result.returncode == 2
    assert "data-size" in result.stderr
    assert run("study", "positions", "--budget", "3s", "--out", tmp_path / "x").returncode == 2
    with pytest.raises(ConfigError, match="varies a ViT"):
        make_study("positions", BASE.replace(model=ResNetConfig(image_size=(32, 32), layers=(1, 1, 1), kind="cifar")))
