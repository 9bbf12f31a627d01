"""Studies of what led to ViT: text models, BERT, built-in properties, attention in ResNets, and the whole story."""

import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.command import run_in_process
from helpers.small_study import BASE
from patchword.config import ResNetConfig, ViTConfig
from patchword.errors import ConfigError
from patchword.lineage.fit import TextConfig
from patchword.lineage.sentences import INDEX, TOPICS, draw_sentences
from patchword.models import build_model
from patchword.plots.alignment_plot import AlignmentMap, alignment_svg
from patchword.plots.theme import DARK, LIGHT, use_theme
from patchword.studies import LINEAGE_STUDIES, lineage_story, make_study, run_lineage, run_study
from patchword.studies.bert_study import BertRun, count_same_topic
from patchword.studies.equivariance import layers_to_see_all
from patchword.studies.lineage_steps import STEPS, vit_on_digits
from patchword.studies.runner import BudgetTooShortError
from patchword.studies.study import Length, ResultRow
from patchword.studies.study_report import describe_study, make_panels, write_study
from patchword.studies.text_studies import TextRun


def no_time() -> float:
    return 0.0


@pytest.mark.parametrize("name", LINEAGE_STUDIES)
def test_cells_differ_and_can_be_stored(name: str) -> None:
    study = make_study(name)
    assert len({cell.name for cell in study.cells}) == len(study.cells) >= 2
    settings = [str(cell.config.to_json()) for cell in study.cells]
    assert len(set(settings)) == len(settings), "a resumed study tells its cells apart by their settings"
    assert all((study.question, study.paper, study.axis))
    assert "/" not in "".join(cell.name for cell in study.cells)


@pytest.mark.parametrize("name", [*LINEAGE_STUDIES, "lineage"])
def test_studies_with_data_of_their_own_refuse_a_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_in_process(capsys, "study", name, "--recipe", "cifar10_scratch", "--out", tmp_path / "study")
    assert result.returncode == 2
    assert "Leave --recipe out." in result.stderr
    assert not (tmp_path / "study").exists()


def test_a_misspelled_study_is_corrected() -> None:
    with pytest.raises(ConfigError, match="Did you mean seq2seq"):
        make_study("seq2seqs")
    with pytest.raises(ConfigError, match="Did you mean lineage"):
        make_study("linage")


# Equivariance


def test_equivariance_measures_what_is_built_in(tmp_path: Path) -> None:
    study = make_study("equivariance")
    rows = run_study(study, tmp_path / "study", budget=1.0, seeds=2)
    worst = {(row["series"], row["x"]): [] for row in rows}  # type: dict[Any, list[float]]
    for row in rows:
        worst[row["series"], row["x"]].append(row["value"])
    assert max(worst["image shifted", "convolutions, circular"]) < 1e-6
    assert min(worst["image shifted", "convolutions, zero padding"]) > 0.1
    assert max(worst["image shifted", "ViT without positions"]) < 1e-5
    assert min(worst["image shifted", "ViT"]) > 0.1
    assert max(worst["patches shuffled", "ViT without positions"]) < 1e-5
    assert min(worst["patches shuffled", "ViT"]) > 0.1
    assert min(worst["patches shuffled", "convolutions"]) > 0.1
    assert worst["layers to see all", "convolutions 3x3"] == [31, 31], "each layer adds a pixel on each side"
    assert worst["layers to see all", "ViT"] == [1, 1]
    assert 0.01 < min(worst["attention in two images", "ViT"]) < 1
    write_study(study, rows, tmp_path / "study", "a machine")
    page = (tmp_path / "study" / "report.html").read_text()
    assert "nothing is trained" in page
    assert "convolutions 31, ViT 1" in page.replace("convolutions 3x3 31", "convolutions 31")
    assert run_study(study, tmp_path / "study", budget=9.0, seeds=2) == rows, "resumed, whatever the budget"


def test_layers_are_counted_until_every_pixel_is_seen() -> None:
    def blur(layers: int) -> Callable[[Any], Any]:
        return lambda image: image[..., : 4 * layers, : 4 * layers].sum()

    assert layers_to_see_all(blur) == 8


# Text


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        TextConfig(min_length=2, max_length=4, dim=32),
        TextConfig(min_length=2, max_length=4, dim=32, attention=False),
        TextConfig(model="transformer", min_length=2, max_length=4, dim=32, depth=1),
    ],
)
def test_a_text_run_says_what_its_figures_need(config: TextConfig) -> None:
    first, second = (TextRun(config).run(seed, Length(steps=20), no_time) for seed in (0, 1))
    details = first["details"]
    attends = config.attention or config.model == "transformer"
    assert set(details["by_length"]) == {"2", "3", "4"}
    assert ("alignments" in details) == (config.model == "transformer" or config.attention)
    assert "alignments" not in second["details"], "drawn for one seed only"
    assert len(details["initial_gradients"]) == (2 if config.model == "transformer" else 0)
    assert first["steps"] == 20
    assert first["n"] > 100
    if attends and details["alignments"][0]["output"]:
        weights = np.array(details["alignments"][0]["weights"])
        assert weights.shape[1] == len("transformer")
        assert (weights.sum(axis=1) <= 1.01).all()


def seq2seq_rows() -> list[ResultRow]:
    """Rows as a run of the study would have: fixed context fails at length 24, attention does not; one diverged."""
    rows: list[ResultRow] = []
    alignment = {"source": ["five", "<&>"], "output": ["오", "만"], "weights": [[0.9, 0.1], [0.002, 0.998]]}
    for cell in make_study("seq2seq").cells:
        long = 0.0 if cell.series == "fixed context" else 0.9
        details: dict[str, Any] = {"by_length": {"4": 1.0, "24": long}, "initial_gradients": [], "loss": 1.0}
        if cell.series != "fixed context":
            details["alignments"] = [alignment]
        for seed in (0, 1):
            rows.append(ResultRow(cell=cell.name, series=cell.series, x=cell.x, seed=seed, accuracy=0.5, n=9, steps=1,
                                  seconds=1.0, details=details))  # fmt: skip
    rows[0] = ResultRow(cell=rows[0]["cell"], series="fixed context", x="RNN", seed=0, accuracy=None, diverged="nan")
    return rows


def test_figures_of_seq2seq_show_lengths_and_alignments(tmp_path: Path) -> None:
    study, rows = make_study("seq2seq"), seq2seq_rows()
    lengths, letters, korean = make_panels(study, rows)
    assert "LSTM with fixed context 0%" in lengths.caption
    assert "LSTM with attention 90%" in lengths.caption
    assert "numerals" not in lengths.caption
    assert lengths.draw is not None
    with use_theme(LIGHT):
        labels = [line.get_label() for line in lengths.draw().axes[0].lines]
    assert "LSTM, fixed context" in labels and "Transformer" in labels and len(labels) == 7
    assert letters.svg is not None and korean.svg is not None
    assert korean.svg(LIGHT).count("만") == korean.svg(LIGHT).count("오") > 0
    titles = re.findall(r'font-weight="600">([^<]*)<', korean.svg(LIGHT))
    models = ["Numbers: LSTM with attention", "Dates: LSTM with attention", "Dates: Transformer"]
    assert titles == [title for title in models for _ in range(2)], "for each of two seeds"
    write_study(study, rows, tmp_path, "a machine")
    assert (tmp_path / "alignment_korean.svg").is_file()
    assert "data:image/svg+xml" in (tmp_path / "report.html").read_text()


def test_figures_of_warm_up_name_what_failed() -> None:
    study = make_study("warmup")
    rows = []
    for cell in study.cells:
        fails = cell.series == "post-norm, no warm-up" and cell.x == 4e-3
        details = {"initial_gradients": [1.0, 2.0, 3.0, 4.0]}
        rows.append(ResultRow(cell=cell.name, series=cell.series, x=cell.x, seed=0, n=9, steps=1, seconds=1.0,
                              accuracy=0.0 if fails else 1.0, details=details))  # fmt: skip
    grid, gradients = make_panels(study, rows)
    assert grid.caption == "Failed (below 10%): post-norm, no warm-up at 0.004."
    assert "post-norm fails with warm-up, too" in study.limits
    for panel in (grid, gradients):
        assert panel.draw is not None
        with use_theme(LIGHT):
            assert panel.draw().axes


def test_captions_name_what_a_study_found() -> None:
    def rows(name: str, *accuracies: float | None) -> list[ResultRow]:
        cells = make_study(name).cells
        return [ResultRow(cell=cell.name, series=cell.series, x=cell.x, seed=0, accuracy=accuracy)
                for cell, accuracy in zip(cells, accuracies, strict=True)]  # fmt: skip

    order = make_panels(make_study("order"), rows("order", 0.9, 1.0, 0.0, None))[0].caption
    assert re.findall(r"[\d.]+%|\(diverged\)", order) == ["90.0%", "0.0%", "100.0%", "(diverged)"]
    spelling = make_panels(make_study("spelling"), rows("spelling", 0.4, 0.5, 0.45))[0].caption
    assert "fixed context vector 40.0%, LSTM with attention 50.0%, Transformer 45.0%" in spelling


def test_a_step_is_measured_by_two_cells() -> None:
    for step in STEPS:
        cells = (vit_on_digits() if step.study == "vit" else make_study(step.study)).cells
        assert {step.contrast.before[1], step.contrast.after[1]} <= {cell.name for cell in cells}
    contrast = STEPS[0].contrast.measure(seq2seq_rows())
    assert contrast.before == ("fixed context vector", "0.0%"), "at length 24, not the mean over lengths"
    assert contrast.after == ("attention", "90.0%")
    diverged = [ResultRow(cell="digits_ViT", series="digits", x="ViT", seed=0, accuracy=None)]
    assert STEPS[-1].contrast.show_cell("digits_ViT", diverged) == "diverged"


def test_alignments_are_drawn_as_svg() -> None:
    weights = [[1.0, 0.0, 0.0], [0.25, 0.5, 0.25]]
    svg = alignment_svg([AlignmentMap("a < b", ("x", "<&>", "긴낱말"), ("첫째", "둘째"), weights)], LIGHT)
    root = ElementTree.fromstring(svg)  # escaped, or it would not parse
    space = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.iter(f"{space}text")] == ["a < b", "x", "<&>", "긴낱말", "첫째", "둘째"]
    filled = [each for each in root.iter(f"{space}rect") if each.get("fill") == LIGHT.series[0]]
    assert [float(each.get("opacity", "")) for each in filled] == [1.0, 0.25, 0.5, 0.25]
    positions = {(each.get("x"), each.get("y")) for each in root.iter(f"{space}rect") if each.get("rx")}
    assert len(positions) == 6, "a cell for each pair"
    assert svg != alignment_svg([AlignmentMap("a < b", ("x", "<&>", "긴낱말"), ("첫째", "둘째"), weights)], DARK)


def test_alignments_that_do_not_fit_start_a_new_row() -> None:
    wide = AlignmentMap("a", tuple("abcdefghijklmnop"), ("a",), [[1 / 16] * 16])
    svg = alignment_svg([wide, wide], LIGHT)
    (first, second) = re.findall(r"translate\((\d+) (\d+)\)\"><text y", svg)
    assert first[0] == second[0]
    assert int(second[1]) - int(first[1]) >= wide.size[1]


# BERT


def test_sentences_are_about_their_topic() -> None:
    sentences = draw_sentences(300, seed=1)
    assert sentences == draw_sentences(300, seed=1) != draw_sentences(300, seed=2)
    assert {len(tokens) for tokens in sentences.tokens} == {11}
    words = {INDEX[word]: topic for topic, (_, words) in enumerate(TOPICS.items()) for word in words.split()}
    assert len(words) == 15 * len(TOPICS), "no word belongs to two topics"
    own = [words[token] == topic for tokens, topic in zip(sentences.tokens, sentences.topics, strict=True)
           for token in tokens if token in words]  # fmt: skip
    assert len(own) == 5 * 300
    assert 0.82 < np.mean(own) < 0.93, "15 % are drawn from all six topics"
    few = sentences.per_topic(2)
    assert few.topics == [topic for topic in range(len(TOPICS)) for _ in range(2)]
    assert all(tokens in sentences.tokens for tokens in few.tokens)


def test_nearest_words_of_one_topic_are_counted() -> None:
    topics = np.repeat(np.arange(len(TOPICS)), 15)
    assert count_same_topic((topics[:, None] == topics).astype(float)) == 1.0
    assert count_same_topic((topics[:, None] != topics).astype(float)) == 0.0


@pytest.mark.slow
def test_pretraining_helps_when_labels_are_few() -> None:
    length = Length(steps=1000)
    pretrained, scratch = (
        BertRun(pretrained=each, labels_per_topic=1).run(0, length, no_time) for each in (True, False)
    )
    assert pretrained["steps"] == scratch["steps"] == 1000
    assert pretrained["accuracy"] > scratch["accuracy"] + 0.1
    assert pretrained["details"]["same_topic"] > 0.3
    study = make_study("bert")
    rows: list[Any] = [{"cell": cell.name, "series": cell.series, "x": cell.x, "seed": 0, **row} for cell, row in
                       zip(study.cells, 4 * [pretrained] + 4 * [scratch], strict=True)]  # fmt: skip
    accuracy, words = make_panels(study, rows)
    assert f"{pretrained['details']['same_topic']:.0%} belong to its topic" in words.caption
    accuracies = [f"{row['accuracy']:.1%}" for row in (pretrained, scratch)]
    assert accuracy.caption.startswith("With one labeled sentence per topic, the pre-trained model gets ")
    assert re.findall(r"[\d.]+%", accuracy.caption) == 2 * accuracies
    for panel in (accuracy, words):
        assert panel.draw is not None
        with use_theme(DARK):
            assert panel.draw().axes


# Attention in ResNets


def test_models_of_sasa_have_equally_many_parameters() -> None:
    sizes = [
        sum(p.numel() for p in build_model(cell.config.model).parameters())
        for cell in make_study("sasa").cells  # type: ignore[union-attr]
    ]
    assert max(sizes) / min(sizes) < 1.05


def test_forms_of_non_local_differ_in_the_form_only() -> None:
    models = [cell.config.model for cell in make_study("non-local").cells]  # type: ignore[union-attr]
    assert all(isinstance(model, ResNetConfig) for model in models)
    assert [model.non_local for model in models] == [None, "gaussian", "embedded", "dot", "concat"]
    assert {model.replace(non_local=None) for model in models} == {models[0]}


@pytest.mark.parametrize("name", ["non-local", "sasa"])
def test_small_resnets_refuse_large_images(name: str) -> None:
    with pytest.raises(ConfigError, match="--recipe: this study compares small ResNets"):
        make_study(name, BASE.replace(model=ViTConfig()))


# The whole story


@pytest.fixture
def two_chapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two studies that are quick: nothing is trained in the first, and thirty steps in each run of the second."""
    steps = [step for step in lineage_story.STEPS if step.study in ("equivariance", "vit")]
    monkeypatch.setattr(lineage_story, "STEPS", steps)
    monkeypatch.setattr(lineage_story, "vit_on_digits", lambda: replace(vit_on_digits(), min_steps=30))
    monkeypatch.setattr("patchword.studies.runner.time_cells", lambda study, now: [(10.0, 0.0)] * len(study.cells))


@pytest.mark.slow
@pytest.mark.usefixtures("two_chapters")
def test_the_story_has_a_chapter_for_each_study(tmp_path: Path) -> None:
    out = tmp_path / "story"
    rows = run_lineage(out, budget=7200, machine="a machine")
    assert list(rows) == ["equivariance", "vit"]
    page = (out / "report.html").read_text()
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert [title for title in titles if title[0].isdigit()] == [step.title for step in lineage_story.STEPS]
    assert (out / "equivariance.png").is_file()
    assert (out / "vit.png").is_file()
    overview = re.search(r"<nav.*?</nav>", page, re.DOTALL)
    assert overview is not None
    figures = [f"{row['accuracy']:.1%}" for row in (rows["vit"][1], rows["vit"][0])]  # without positions, with them
    assert re.findall("<b>([^<]*)</b>", overview[0]) == ["31", "1", *figures]
    assert f"ViT {figures[1]}, the same without position embeddings {figures[0]}" in page
    assert run_lineage(out, budget=7200, machine="a machine") == rows, "resumed: nothing is run again"
    with pytest.raises(ConfigError, match="started with --budget 120m --seeds 1"):
        run_lineage(out, budget=9000)


@pytest.mark.usefixtures("two_chapters")
def test_a_story_that_was_stopped_in_its_first_chapter_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "story"
    monkeypatch.setattr(lineage_story, "STEPS", lineage_story.STEPS[:1])

    def stop(*args: Any) -> Any:
        (out / "equivariance").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lineage_story, "run_study", stop)
        with pytest.raises(KeyboardInterrupt):
            run_lineage(out, budget=7200)
    assert list(run_lineage(out, budget=7200)) == ["equivariance"]


STOPPED_WHILE_PLANNING = """
import sys, time
from patchword.cli.main import main
from patchword.studies import lineage_story, runner

def plan_for_long(study, now):
    print("planning", flush=True)
    time.sleep(600)

lineage_story.STEPS = [step for step in lineage_story.STEPS if step.study in ("equivariance", "vit")]
runner.time_cells = plan_for_long
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("two_chapters")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_story_that_was_stopped_while_it_planned_is_resumed_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: signal.Signals
) -> None:
    command = ["study", "lineage", "--budget", "2h", "--out", str(tmp_path / "story")]
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_WHILE_PLANNING, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"planning\n"
        process.send_signal(stop)
        assert process.wait(60) == (130 if stop == signal.SIGINT else -signal.SIGKILL)
    assert (tmp_path / "story/equivariance/plan.json").is_file(), "the first chapter was planned"
    assert not (tmp_path / "story/vit/plan.json").exists()
    result = run_in_process(capsys, *command)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "story/report.html").is_file()


@pytest.mark.usefixtures("two_chapters")
@pytest.mark.parametrize("first_file", ["results.json", "plan.json"])
def test_a_kill_while_the_first_file_is_written_leaves_a_directory_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_file: str
) -> None:
    monkeypatch.setattr(lineage_story, "STEPS", lineage_story.STEPS[:1])
    (tmp_path / f".{first_file}.k1ll3d").mkdir()  # as core.io.atomic_output writes it
    if first_file == "plan.json":
        assert run_study(make_study("equivariance"), tmp_path, budget=1.0)
    else:
        assert run_lineage(tmp_path, budget=7200)


@pytest.mark.usefixtures("two_chapters")
def test_a_refused_budget_removes_nothing_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(BudgetTooShortError):
        run_lineage(tmp_path / "story", budget=1000, say=lambda text: (tmp_path / "story/notes.txt").touch())
    assert [path.name for path in (tmp_path / "story").iterdir()] == ["notes.txt"]


@pytest.mark.usefixtures("two_chapters")
def test_a_budget_that_is_too_short_is_refused_before_the_first_run(tmp_path: Path) -> None:
    out = tmp_path / "story"
    with pytest.raises(BudgetTooShortError, match="too short for '6. ViT.*needs about 104m") as caught:
        run_lineage(out, budget=1000)
    assert not out.exists()
    assert list(run_lineage(out, budget=1.1 * caught.value.needed)) == ["equivariance", "vit"]


def test_the_story_is_not_written_into_another_directory(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the report of the lineage"):
        run_lineage(tmp_path, budget=7200)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_story_asks_known_studies_and_spends_its_budget() -> None:
    assert all(step.study == "vit" or step.study in LINEAGE_STUDIES for step in lineage_story.STEPS)
    assert sum(step.fraction for step in lineage_story.STEPS) == pytest.approx(1)
    facts = dict(describe_study(vit_on_digits(), [], "a machine"))
    assert facts["Machine"] == "a machine"
