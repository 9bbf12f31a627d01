"""The report page: what it says, that nothing in a name or label can break it, and how it is written."""

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from patchword.config import AugmentConfig, Config, DataConfig, ResNetConfig, ViTConfig
from patchword.errors import CheckpointError
from patchword.evaluation.intervals import wilson
from patchword.report import Mistake, Report, report_html, write_report
from patchword.report.curves import smoothed, ticks
from patchword.report.text import duration, shortened, width

VOID = {"meta", "img", "wbr", "line", "rect", "path", "circle", "br"}
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
    """Reads a page and keeps its tags, its texts and every attribute; refuses tags that are not closed in order."""

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
            figures = {"top1": 1 - 1 / step, "top5": 1.0, "nll": 2 / step, "ece": 0.03, "n": 300}
            rows.append({"kind": "val", "step": step, "epoch": step / per_epoch, **figures, "seconds": step})
    return rows


@pytest.fixture(scope="module")
def report() -> Report:
    """A real, poor classifier of digits: the nearest neighbour among few."""
    digits = load_digits()
    known, pictures, true = 150, digits.images[1000:], digits.target[1000:]
    model = KNeighborsClassifier(1).fit(digits.data[:known], digits.target[:known])
    said = model.predict(digits.data[1000:])
    confusion = np.zeros((10, 10), np.int64)
    np.add.at(confusion, (true, said), 1)
    wrong = np.flatnonzero(said != true)
    mistakes = [
        Mistake(f"digits {i}", (pictures[i, :, :, None] * 15).astype(np.uint8), str(true[i]), str(said[i]), 0.75, 3.0)
        for i in wrong
    ]
    figures = {"top1": float((said == true).mean()), "top5": 0.99, "nll": 0.6, "ece": 0.02, "n": len(true)}
    model_config = ViTConfig(image_size=8, patch_size=2, in_channels=1, embed_dim=64, depth=3, num_heads=2, mlp_dim=128)
    config = Config(name="tiny", seed=17, data=DataConfig(source="digits"), model=model_config, batch_size=64)
    return Report(
        title="tiny: digits",
        config=config,
        metrics=metric_rows(),
        labels=[str(k) for k in range(10)],
        part="test",
        figures=figures,
        confusion=confusion,
        mistakes=mistakes,
        parameters=123_456,
        samples={"train": known, "test": len(true)},
        notes=["3 pictures were skipped."],
        machine={"torch": "2.13.0", "cores": 2},
        provenance={"commit": "abc"},
        seconds=75.4,
    )


def test_wilson_is_the_published_interval() -> None:
    # 81 of 263: Newcombe (1998), table I: 0.2553 to 0.3662.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_the_page_says_what_there_is(report: Report) -> None:
    page = Page(report_html(report, "runs tiny"))
    top1, n = report.figures["top1"], int(report.figures["n"])
    low, high = wilson(top1, n)
    for words in (
        f"{100 * top1:.1f}%",
        f"{n} test pictures",
        f"{100 * low:.1f}% to {100 * high:.1f}%",
        "one seed",
        "123,456",
        "4 epochs, 24 steps of 64 pictures",
        "1\u202fmin 15\u202fs".replace("\u202f", " "),
        "800 pictures per second",
        "Seed 17",
        "3 blocks, width 64, 2 heads, patches of 2 x 2 in 8 x 8 pixels",
        "patchword predict 'runs tiny' photo.jpg",
        "patchword convert 'runs tiny' 'runs tiny-timm' --to timm",
        "3 pictures were skipped.",
        "digits: 150 train, 797 test pictures; 10 classes",
        "2.13.0",
    ):
        assert words in page.text, words
    assert json.dumps(report.settings["optim"]["betas"], indent=2).split()[1] in page.text


def test_sections_come_in_order(report: Report) -> None:
    html = report_html(report, "run")
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert titles == [
        "How it learned",
        "What it confuses",
        "Each class, worst first",
        "Hardest mistakes",
        "What to do next",
        "Notes",
        "How to repeat it",
    ]


def test_validation_figures_say_that_they_are_biased(report: Report) -> None:
    biased = "this part also chose the checkpoint"
    assert biased in report_html(replace(report, part="val"), "run")
    assert biased not in report_html(report, "run")


def test_nothing_is_fetched_and_only_our_script_may_run(report: Report) -> None:
    html = report_html(report, "run")
    page = Page(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert all((attributes["src"] or "").startswith("data:image/") for attributes in page.all("img"))
    assert not page.all("link") and not page.all("iframe") and len(page.all("script")) == 1
    script = re.search(r"<script>(.*?)</script>", html, re.S)
    policy = page.all("meta")[1]["content"] or ""
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" == policy


def test_hostile_names_stay_text(report: Report, tmp_path: Path) -> None:
    honest = Page(report_html(report, "run"))
    mistakes = [
        replace(m, name=text, true=text, predicted=text) for m, text in zip(report.mistakes[:10], HOSTILE, strict=True)
    ]
    bad = replace(
        report,
        title=HOSTILE[0] + HOSTILE[9],
        labels=HOSTILE,
        mistakes=mistakes,
        notes=HOSTILE,
        part=HOSTILE[0],
        machine={text: text for text in HOSTILE},
        provenance={"names": HOSTILE},
        config={"data": {"source": HOSTILE[9]}, "init": HOSTILE[0], "model": {}, "name": HOSTILE[6]},
    )
    path = write_report(tmp_path / "<b> 'run' \"x\"", bad)
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert len(page.all("script")) == 1 and len(page.all("title")) >= 1
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in honest.tags} | {"wbr"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert(1)</script>" in page.text
    assert "\\u202egpj.exe" in page.text and "\u202e" not in html
    assert "\\udc80" in page.text and "\\x1b" in page.text and "\x00" not in html and "\x1b" not in html
    assert "x" * 300 in html and not any("x" * 100 in text for text in page.texts if "…" in text)


def test_the_page_test_can_fail(report: Report) -> None:
    html = report_html(report, "run")
    with pytest.raises(AssertionError):
        Page(html.replace("<main>", "<main><b>", 1))


@pytest.mark.parametrize(("classes", "labelled"), [(2, True), (37, True), (60, True), (61, False), (1000, False)])
def test_confusion_is_readable_at_every_size(report: Report, classes: int, labelled: bool) -> None:
    confusion = np.diag(np.full(classes, 9))
    confusion[0, classes - 1] = 4
    labels = [f"label {k}" for k in range(classes)]
    html = report_html(replace(report, labels=labels, confusion=confusion, mistakes=[]), "run")
    page = Page(html)
    assert f"label 0 label {classes - 1} 4 of 13" in page.text
    assert len(html) < 1_000_000
    if labelled:
        assert f"label 0 taken for label {classes - 1}: 4 of 13 (30.8%)" in page.text
        assert "dots" not in [a.get("class") for a in page.all("img")]
    else:
        source = next(a["src"] or "" for a in page.all("img") if a.get("class") == "dots")
        dots = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))
        assert dots.shape[0] == dots.shape[1] <= 260 and dots.shape[2] == 4
        assert tuple(dots[0, -1, :3]) == (224, 106, 12) and dots[0, -1, 3] > 100 and dots[5, 5, 3] == 255
        assert dots[1:-1, -1, 3].max() == 0


def test_pairs_and_classes_are_sorted(report: Report) -> None:
    confusion = np.array([[8, 2, 0], [0, 5, 5], [1, 0, 3]])
    small = replace(report, labels=["a", "b", "c"], confusion=confusion)
    assert small.confused_pairs(9) == [("b", "c", 5, 10), ("a", "b", 2, 10), ("c", "a", 1, 4)]
    assert small.confused_pairs(1) == [("b", "c", 5, 10)]
    assert small.class_scores() == [("b", 10, 0.5), ("c", 4, 0.75), ("a", 10, 0.8)]
    assert small.guessing() == pytest.approx(10 / 24)


def test_a_perfect_model_has_no_mistakes(report: Report) -> None:
    perfect = replace(report, confusion=np.diag([5, 5]), labels=["a", "b"], mistakes=[], figures={"top1": 1.0, "n": 10})
    page = Page(report_html(perfect, "run"))
    assert "No picture was taken for another class." in page.text and "Hardest mistakes" not in page.text
    assert "100.0%" in page.text and "five best guesses" not in page.text


def test_several_labels(report: Report) -> None:
    rows = [{"kind": "val", "step": 9, "epoch": 1.0, "map": 0.61, "f1": 0.5, "nll": 0.3, "n": 80, "seconds": 1.0}]
    per_class = [{"label": "cat", "index": 0, "n": 30, "ap": 0.9}, {"label": "dog", "index": 1, "n": 20, "ap": 0.4}]
    several = replace(
        report, metrics=rows, figures={"map": 0.61, "f1": 0.5, "nll": 0.3, "n": 80}, confusion=None, per_class=per_class
    )
    page = Page(report_html(several, "run"))
    assert "61.0% mean average precision on 80 test pictures" in page.text
    assert "Wilson" not in page.text and "What it confuses" not in page.text
    assert page.text.index("dog 20") < page.text.index("cat 30")


def test_mistakes_are_pictures(report: Report) -> None:
    photo = np.full((300, 400, 3), 200, np.uint8)
    mistakes = [*report.mistakes[:1], Mistake("photo.jpg", photo, "cat", "dog", 0.93, 2.0)]
    page = Page(report_html(replace(report, mistakes=mistakes), "run"))
    small, large = page.all("img")
    assert small["class"] == "crisp" and (small["src"] or "").startswith("data:image/png")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode((small["src"] or "").partition(",")[2]))))
    np.testing.assert_array_equal(pixels, report.mistakes[0].image[:, :, 0])
    with Image.open(io.BytesIO(base64.b64decode((large["src"] or "").partition(",")[2]))) as picture:
        assert picture.size == (240, 180) and picture.format == "JPEG"
    assert "was cat said dog (93%) photo.jpg" in page.text


def paths(html: str) -> Iterator[str]:
    yield from re.findall(r'<path class="([a-z ]+)" d="M', html)


def test_curves(report: Report) -> None:
    html = report_html(report, "run")
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
def test_odd_metrics_make_a_sound_page(report: Report, rows: list[dict[str, Any]]) -> None:
    html = report_html(replace(report, metrics=rows), "run")
    page = Page(html)
    assert len(html) < 400_000
    numbers = " ".join(str(value) for tag, a in page.tags if tag in ("path", "circle", "text") for value in a.values())
    assert not re.search(r"nan|inf", numbers)
    for attributes in page.all("svg"):
        json.loads(attributes.get("data-lines") or "[]")


def test_mixing_is_said_to_raise_the_training_loss(report: Report) -> None:
    assert isinstance(report.config, Config)
    mixed = report.config.replace(augment=AugmentConfig(mixup=0.2))
    assert "not comparable" in report_html(replace(report, config=mixed), "run")
    assert "not comparable" not in report_html(report, "run")


def test_resnet_and_pretrained_runs_are_described(report: Report) -> None:
    assert isinstance(report.config, Config)
    config = report.config.replace(model=ResNetConfig(layers=(2, 2), image_size=32), init="hf:some/model")
    text = Page(report_html(replace(report, config=config), "run")).text
    assert "ResNet, 2, 2 units" in text and "Started from hf:some/model" in text


def test_running_means_do_not_lag() -> None:
    straight = np.arange(200.0)
    np.testing.assert_allclose(smoothed(straight), straight)
    noisy = np.tile([0.0, 1.0], 100)
    assert np.ptp(smoothed(noisy)[20:-20]) < 0.1 and len(smoothed(np.empty(0))) == 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.97), (0, 3e-4), (2.2, 2.3), (0, 12345), (0, 1e-30)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-9 * high <= tick <= high * (1 + 1e-9) for tick in found)
    assert all(len(f"{tick:.4g}".replace("e-", "").replace(".", "").strip("0")) <= 5 for tick in found)


def test_words() -> None:
    assert [duration(s) for s in (1.25, 59, 75.4, 3720)] == [
        "1.2\u202fs",
        "59\u202fs",
        "1\u202fmin 15\u202fs",
        "1\u202fh 2\u202fmin",
    ]
    assert shortened("abcdefghij", 10) == "abcdefghij" and shortened("abcdefghijk", 10) == "abcdef…ijk"
    assert width("日本") > 2 * width("ab") * 0.8


def test_write_replaces_and_leaves_nothing_else(report: Report, tmp_path: Path) -> None:
    first = write_report(tmp_path / "run", report)
    second = write_report(tmp_path / "run", replace(report, title="second"))
    assert first == second == tmp_path / "run/report.html"
    assert "<title>second</title>" in second.read_text()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_a_folder_that_cannot_be_written(report: Report, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_report(tmp_path / "file", report)


FULL = """
import resource, sys
from pathlib import Path
from patchword.errors import PatchwordError
from patchword.report import Report, write_report
report = Report(title="new", config={}, metrics=[], labels=["a"], part="test", figures={"top1": 1.0, "n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # as a full disk: the write stops in its middle
try:
    write_report(Path(sys.argv[1]), report)
except PatchwordError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_page(report: Report, tmp_path: Path) -> None:
    path = write_report(tmp_path, report)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True)
    assert "report.html could not be written" in done.stdout and "nothing was changed" in done.stdout
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["report.html"]
