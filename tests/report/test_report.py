"""HTML reports: their content, escaping of names and labels, and how they are written."""

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from patchword.config import AugmentConfig, Config, DataConfig, ResNetConfig, ViTConfig
from patchword.core.text import escape_unprintable
from patchword.errors import OutputError
from patchword.metrics.intervals import wilson
from patchword.plots.panel import Panel
from patchword.report import Mistake, TrainingReport, training_html, write_training_report
from patchword.report.curves import running_mean, ticks
from patchword.report.environment import render
from patchword.report.formatting import break_points, duration, shorten, text_width
from patchword.report.pages import Chapter, Contrast, evaluation_html, inspection_html, story_html, study_html
from patchword.report.report_data import ClassificationResults

ROOT = Path(__file__).parents[2]
VOID = {"meta", "img", "source", "wbr", "line", "rect", "path", "circle", "br"}
INLINE = {"bdi", "b", "wbr"}
HOSTILE = [
    "<script>alert(1)</script>",
    "\"double\" & 'single' <b>",
    "new\nline\ttab\x1b[31m\x00",
    "\u202egpj.exe",
    "عربي english",
    "x" * 300,
    "half \udc80 and \ud83d",
    "日本語のラベル",
    "",
    "</title></style></svg><img src=x onerror=alert(1)>",
]


class Page(HTMLParser):
    """Parses a page into tags, attributes and texts; rejects tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append("" if tag in INLINE else " ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.texts.append("" if tag in INLINE else " ")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def metric_rows(epochs: int = 4, per_epoch: int = 6) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, epochs * per_epoch + 1):
        row = {"kind": "train", "step": step, "epoch": step / per_epoch, "loss": 3 / step, "lr": 1e-3 / step}
        rows.append({**row, "accuracy": None, "grad_norm": 1.0 + step % 3, "seconds": step, "images_per_second": 800.0})
        if step % per_epoch == 0:
            metrics = {"top1": 1 - 1 / step, "top5": 1.0, "nll": 2 / step, "ece": 0.03, "n": 300}
            rows.append({"kind": "val", "step": step, "epoch": step / per_epoch, **metrics, "seconds": step})
    return rows


@pytest.fixture(scope="module")
def report() -> TrainingReport:
    """A nearest-neighbor classifier of digits with few training images, so that it makes mistakes."""
    digits = load_digits()
    num_train, images, true = 150, digits.images[1000:], digits.target[1000:]
    model = KNeighborsClassifier(1).fit(digits.data[:num_train], digits.target[:num_train])
    predicted = model.predict(digits.data[1000:])
    confusion = np.zeros((10, 10), np.int64)
    np.add.at(confusion, (true, predicted), 1)
    wrong = np.flatnonzero(predicted != true)
    mistakes = [
        Mistake(
            f"digits {i}", (images[i, :, :, None] * 15).astype(np.uint8), str(true[i]), str(predicted[i]), 0.75, 3.0
        )
        for i in wrong
    ]
    metrics = {"top1": float((predicted == true).mean()), "top5": 0.99, "nll": 0.6, "ece": 0.02, "n": len(true)}
    model_config = ViTConfig(image_size=8, patch_size=2, in_channels=1, embed_dim=64, depth=3, num_heads=2, mlp_dim=128)
    config = Config(name="tiny", seed=17, data=DataConfig(source="digits"), model=model_config, batch_size=64)
    return TrainingReport(
        title="tiny: digits",
        config=config,
        history=metric_rows(),
        labels=[str(k) for k in range(10)],
        split="test",
        metrics=metrics,
        confusion=confusion,
        mistakes=mistakes,
        parameters=123_456,
        samples={"train": num_train, "test": len(true)},
        notes=["3 images were skipped."],
        machine={"torch": "2.13.0", "cores": 2},
        provenance={"commit": "abc"},
        seconds=75.4,
    )


def test_wilson_matches_published_intervals() -> None:
    # 81 of 263: Newcombe (1998), table I: 0.2553 to 0.3662.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_page_shows_results_and_setup(report: TrainingReport) -> None:
    page = Page(training_html(report, "runs tiny"))
    top1, n = report.metrics["top1"], int(report.metrics["n"])
    low, high = wilson(top1, n)
    for text in (
        f"{100 * top1:.1f}%",
        f"top-1 accuracy on {n} test images",
        f"{100 * low:.1f}% to {100 * high:.1f}%",
        "one seed",
        "123,456",
        "4 epochs, 24 steps, batch size 64",
        "1\u202fmin 15\u202fs".replace("\u202f", " "),
        "800 images per second",
        "Seed 17",
        "3 blocks, width 64, 2 heads, 2 x 2 patches, 8 x 8 images",
        "patchword predict 'runs tiny' photo.jpg",
        "patchword convert 'runs tiny' 'runs tiny-timm' --to timm",
        "3 images were skipped.",
        "digits: 150 training, 797 test images; 10 classes",
        "2.13.0",
    ):
        assert text in page.text
    assert json.dumps(report.settings["optim"]["betas"], indent=2).split()[1] in page.text


def test_order_of_sections(report: TrainingReport) -> None:
    html = training_html(report, "run")
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert titles == [
        "Training curves",
        "Confusion matrix",
        "Per-class accuracy",
        "Hardest mistakes",
        "Next steps",
        "Notes",
        "Reproducibility",
    ]


def test_validation_metrics_are_marked_as_biased(report: TrainingReport) -> None:
    biased = "selected on the validation set"
    assert biased in training_html(replace(report, split="val"), "run")
    assert biased not in training_html(report, "run")


def assert_self_contained(html: str) -> Page:
    """The page loads nothing, and its policy allows only its own style sheet and script."""
    page = Page(html)
    without_base64 = re.sub(r'"data:[^"]*"|sha256-[\w+/=]+', "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", without_base64)
    sources = [value or "" for _, tag in page.tags for name, value in tag.items() if name in ("src", "srcset", "href")]
    assert all(source.startswith(("data:image/", "#")) for source in sources)  # "#": places in the page
    assert not page.all("link")
    assert not page.all("iframe")
    # The policy has no 'unsafe-inline', so these would be ignored.
    assert not any(name == "style" or name.startswith("on") for _, tag in page.tags for name in tag)
    policy = page.all("meta")[1]["content"] or ""
    digests = []
    for element in ("style", "script"):
        found = re.findall(rf"<{element}>(.*?)</{element}>", html, re.S)
        assert len(found) == 1
        assert found[0].strip()
        digests.append(base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode())
    style, script = digests
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}'"
    return page


def test_page_is_self_contained(report: TrainingReport) -> None:
    assert_self_contained(training_html(report, "run"))


def line_figure() -> Figure:
    figure = Figure((3, 2))
    figure.subplots().plot([0, 1])
    return figure


@pytest.mark.parametrize("text", HOSTILE[:5] + HOSTILE[9:])
def test_hostile_text_is_escaped_on_the_other_pages(report: TrainingReport, text: str) -> None:
    """Facts, notes, titles, captions and tables of the evaluation, inspection and study reports."""
    drawn = Panel("a", text, text, text, line_figure, {}, (("head", text), (text, text)))
    absent = Panel.absent("b", text, text)
    labels = [text, *report.labels[1:]]
    mistakes = [replace(report.mistakes[0], name=text, true=text, predicted=text)]
    results = ClassificationResults(
        labels=labels, metrics=report.metrics, confusion=report.confusion, mistakes=mistakes
    )
    facts = [("model", text), (text, text)]
    pages = [
        evaluation_html(text, results, {"top1": (0.5, 0.9), "nll": (0.1, 0.2)}, facts, [drawn], text, [text]),
        inspection_html(text, facts, [drawn, absent], [text]),
        study_html(text, facts, [drawn], text),
        story_html(
            text, facts, [Chapter(text, text, facts, [drawn], text, Contrast(text, (text, text), (text, text)))]
        ),
    ]
    for html in pages:
        page = assert_self_contained(html)
        assert escape_unprintable(text) in page.text
        assert "\u202e" not in html
        assert "\x1b" not in html
        assert len(page.all("script")) == 1
        assert len(page.all("img")) == len(re.findall("<img[ >]", html))


def test_templates_escape_values_and_reject_undefined_ones() -> None:
    with pytest.raises(UndefinedError, match="facts"):
        render("inspection.html.j2", title="t", panels=[], absent=[], notes=[])
    html = render("inspection.html.j2", title="t", facts=[("<b>", "\x07")], panels=[], absent=["a & b"], notes=[])
    assert "&lt;b&gt;" in html
    assert "\\x07" in html
    assert "a &amp; b" in html


def test_templates_are_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["patchword"]
    templates = list((ROOT / "src/patchword/report/templates").iterdir())
    assert len(templates) >= 10
    for path in templates:
        assert any(path.relative_to(ROOT / "src/patchword").match(pattern) for pattern in patterns), path.name


def test_hostile_names_are_escaped(report: TrainingReport, tmp_path: Path) -> None:
    expected = Page(training_html(report, "run"))
    mistakes = [
        replace(m, name=text, true=text, predicted=text) for m, text in zip(report.mistakes[:10], HOSTILE, strict=True)
    ]
    hostile = replace(
        report,
        title=HOSTILE[0] + HOSTILE[9],
        labels=HOSTILE,
        mistakes=mistakes,
        notes=HOSTILE,
        split=HOSTILE[0],
        machine={text: text for text in HOSTILE},
        provenance={"names": HOSTILE},
        config={"data": {"source": HOSTILE[9]}, "init": HOSTILE[0], "model": {}, "name": HOSTILE[6]},
    )
    path = write_training_report(tmp_path / "<b> 'run' \"x\"", hostile)
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert len(page.all("script")) == 1
    assert len(page.all("title")) >= 1
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in expected.tags} | {"wbr"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert(1)</script>" in page.text
    assert "\\u202egpj.exe" in page.text
    assert "\u202e" not in html
    assert "\\udc80" in page.text
    assert "\\x1b" in page.text
    assert "\x00" not in html
    assert "\x1b" not in html
    assert "x" * 300 in html
    assert not any("x" * 100 in text for text in page.texts if "…" in text)


def test_page_parser_rejects_unclosed_tags(report: TrainingReport) -> None:
    html = training_html(report, "run")
    with pytest.raises(AssertionError):
        Page(html.replace("<main>", "<main><b>", 1))


@pytest.mark.parametrize(("classes", "labeled"), [(2, True), (37, True), (60, True), (61, False), (1000, False)])
def test_confusion_matrix_of_every_size(report: TrainingReport, classes: int, labeled: bool) -> None:
    confusion = np.diag(np.full(classes, 9))
    confusion[0, classes - 1] = 4
    labels = [f"label {k}" for k in range(classes)]
    html = training_html(replace(report, labels=labels, confusion=confusion, mistakes=[]), "run")
    page = Page(html)
    assert f"label 0 label {classes - 1} 4 of 13" in page.text
    assert len(html) < 1_000_000
    if labeled:
        assert f"label 0 predicted as label {classes - 1}: 4 of 13 (30.8%)" in page.text
        assert "dots" not in [a.get("class") for a in page.all("img")]
    else:
        source = next(a["src"] or "" for a in page.all("img") if a.get("class") == "dots")
        dots = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))
        assert dots.shape[0] == dots.shape[1] <= 260
        assert dots.shape[2] == 4
        assert tuple(dots[0, -1, :3]) == (224, 106, 12)
        assert dots[0, -1, 3] > 100
        assert dots[5, 5, 3] == 255
        assert dots[1:-1, -1, 3].max() == 0


def test_pairs_and_classes_are_sorted(report: TrainingReport) -> None:
    confusion = np.array([[8, 2, 0], [0, 5, 5], [1, 0, 3]])
    small = replace(report, labels=["a", "b", "c"], confusion=confusion)
    assert small.confused_pairs(9) == [("b", "c", 5, 10), ("a", "b", 2, 10), ("c", "a", 1, 4)]
    assert small.confused_pairs(1) == [("b", "c", 5, 10)]
    assert small.class_scores() == [("b", 10, 0.5), ("c", 4, 0.75), ("a", 10, 0.8)]
    assert small.majority_baseline() == pytest.approx(10 / 24)


def test_perfect_model_has_no_mistakes(report: TrainingReport) -> None:
    perfect = replace(report, confusion=np.diag([5, 5]), labels=["a", "b"], mistakes=[], metrics={"top1": 1.0, "n": 10})
    page = Page(training_html(perfect, "run"))
    assert "No image was misclassified." in page.text
    assert "Hardest mistakes" not in page.text
    assert "100.0%" in page.text
    assert "top-5" not in page.text


def test_multi_label(report: TrainingReport) -> None:
    rows = [{"kind": "val", "step": 9, "epoch": 1.0, "map": 0.61, "f1": 0.5, "nll": 0.3, "n": 80, "seconds": 1.0}]
    per_class = [{"label": "cat", "index": 0, "n": 30, "ap": 0.9}, {"label": "dog", "index": 1, "n": 20, "ap": 0.4}]
    multi_label = replace(
        report, history=rows, metrics={"map": 0.61, "f1": 0.5, "nll": 0.3, "n": 80}, confusion=None, per_class=per_class
    )
    page = Page(training_html(multi_label, "run"))
    assert "61.0% mean average precision on 80 test images" in page.text
    assert "Wilson" not in page.text
    assert "Confusion matrix" not in page.text
    assert page.text.index("dog 20") < page.text.index("cat 30")


def test_mistakes_show_their_images(report: TrainingReport) -> None:
    photo = np.full((300, 400, 3), 200, np.uint8)
    mistakes = [*report.mistakes[:1], Mistake("photo.jpg", photo, "cat", "dog", 0.93, 2.0)]
    page = Page(training_html(replace(report, mistakes=mistakes), "run"))
    small, large = page.all("img")
    assert small["class"] == "pixelated"
    assert (small["src"] or "").startswith("data:image/png")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode((small["src"] or "").partition(",")[2]))))
    np.testing.assert_array_equal(pixels, report.mistakes[0].image[:, :, 0])
    with Image.open(io.BytesIO(base64.b64decode((large["src"] or "").partition(",")[2]))) as image:
        assert image.size == (240, 180)
        assert image.format == "JPEG"
    assert "true: cat predicted: dog (93%) photo.jpg" in page.text


def paths(html: str) -> Iterator[str]:
    yield from re.findall(r'<path class="([a-z ]+)" d="M', html)


def test_curves(report: TrainingReport) -> None:
    html = training_html(report, "run")
    assert list(paths(html)) == ["train raw", "train", "val", "val", "rate", "rate raw", "rate"]
    for data in (attributes.get("data-lines") for attributes in Page(html).all("svg")):
        if data:
            for each in json.loads(data):
                assert all(0 <= x <= 520 for x, _ in each["points"])
    loss = json.loads(next(a["data-lines"] or "" for a in Page(html).all("svg") if a.get("data-lines")))
    assert loss[1]["points"][-1][1] == "0.0833  epoch 4, step 24"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"kind": "val", "step": 1, "epoch": 0.0, "top1": 0.0, "nll": float("nan"), "n": 3}],
        [{"kind": "train", "step": s, "epoch": s, "loss": float("inf"), "lr": 0.0, "accuracy": None} for s in range(5)],
        [{"kind": "train", "step": s, "epoch": s / 9, "loss": 1e-30 * s, "lr": 0.1} for s in range(3)],
        metric_rows(500, 10),
    ],
)
def test_unusual_metrics_give_a_valid_page(report: TrainingReport, rows: list[dict[str, Any]]) -> None:
    html = training_html(replace(report, history=rows), "run")
    page = Page(html)
    assert len(html) < 400_000
    numbers = " ".join(str(value) for tag, a in page.tags if tag in ("path", "circle", "text") for value in a.values())
    assert not re.search(r"nan|inf", numbers)
    for attributes in page.all("svg"):
        json.loads(attributes.get("data-lines") or "[]")


def test_note_on_the_training_loss_with_mixup(report: TrainingReport) -> None:
    assert isinstance(report.config, Config)
    mixed = report.config.replace(augment=AugmentConfig(mixup=0.2))
    assert "not comparable" in training_html(replace(report, config=mixed), "run")
    assert "not comparable" not in training_html(report, "run")


def test_resnet_and_pretrained_runs_are_described(report: TrainingReport) -> None:
    assert isinstance(report.config, Config)
    config = report.config.replace(model=ResNetConfig(layers=(2, 2), image_size=32), init="hf:some/model")
    text = Page(training_html(replace(report, config=config), "run")).text
    assert "ResNet: 2, 2 blocks" in text
    assert "Initialized from hf:some/model" in text


def test_running_means_do_not_lag() -> None:
    straight = np.arange(200.0)
    np.testing.assert_allclose(running_mean(straight), straight)
    noisy = np.tile([0.0, 1.0], 100)
    assert np.ptp(running_mean(noisy)[20:-20]) < 0.1
    assert len(running_mean(np.empty(0))) == 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.97), (0, 3e-4), (2.2, 2.3), (0, 12345), (0, 1e-30)])
def test_ticks_are_few_round_and_in_range(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-9 * high <= tick <= high * (1 + 1e-9) for tick in found)
    assert all(len(f"{tick:.4g}".replace("e-", "").replace(".", "").strip("0")) <= 5 for tick in found)


def test_formatting() -> None:
    assert [duration(s) for s in (1.25, 59, 75.4, 3720)] == [
        "1.2\u202fs",
        "59\u202fs",
        "1\u202fmin 15\u202fs",
        "1\u202fh 2\u202fmin",
    ]
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcdef…ijk"
    assert break_points("a_b/c") == ["a_", "b/", "c"]
    assert break_points("") == [""]
    assert text_width("日本") > 2 * text_width("ab") * 0.8


def test_write_replaces_the_report_and_leaves_no_other_file(report: TrainingReport, tmp_path: Path) -> None:
    first = write_training_report(tmp_path / "run", report)
    second = write_training_report(tmp_path / "run", replace(report, title="second"))
    assert first == second == tmp_path / "run/report.html"
    assert "<title>second</title>" in second.read_text()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_unwritable_folder(report: TrainingReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"/file/report\.html") as error:
        write_training_report(tmp_path / "file", report)
    assert error.value.code == "cannot_write"


WRITE_ON_FULL_DISK = """
import resource, sys
from pathlib import Path
from patchword.errors import PatchwordError
from patchword.report import TrainingReport, write_training_report
report = TrainingReport(title="new", config={}, history=[], labels=["a"], split="test", metrics={"top1": 1.0, "n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # like a full disk: the write fails in the middle
try:
    write_training_report(Path(sys.argv[1]), report)
except PatchwordError as error:
    print(error.code, error)
"""


@pytest.mark.slow
def test_full_disk_keeps_the_old_report(report: TrainingReport, tmp_path: Path) -> None:
    path = write_training_report(tmp_path, report)
    before = path.read_bytes()
    command = [sys.executable, "-c", WRITE_ON_FULL_DISK, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot_write {path} ")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
