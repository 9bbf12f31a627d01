"""The doctor: every defect that is planted is found, and healthy data get no warning."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from rich.console import Console
from sklearn.datasets import load_digits

from helpers.shared_data import shared_path
from patchword.cli.commands.doctor_command import doctor as doctor_command
from patchword.config import Config, DataConfig, OptimConfig, ViTConfig
from patchword.core import runtime
from patchword.core.text import escape_unprintable
from patchword.data.formats.image_folder import list_labeled_images
from patchword.data.resolve import open_data
from patchword.data.sources import ArraySource, DatasetSplits, FileSource, from_arrays
from patchword.doctor import Finding, examine, examine_config, findings_table, machine_findings, machine_info
from patchword.doctor.image_survey import ImageSummary, read_header, summarize_image
from patchword.doctor.near_duplicates import (
    MAX_DIFFERENCE,
    MIN_CORRELATION,
    candidate_pairs,
    correlation,
    difference_hashes,
)
from patchword.recipes import RECIPES, load_recipe
from patchword.training import train

PARTS = {"train": 12, "val": 4, "test": 4}
CLASSES = ("cat", "dog", "owl")


def photo(seed: int, size: tuple[int, int] = (96, 80)) -> Image.Image:
    """Something like a photograph: soft coloured areas and a little noise, unlike that of any other seed."""
    rng = np.random.default_rng(seed)
    areas = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.normal(0, 6, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(areas) + noise, 0, 255).astype(np.uint8))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clean data set: three parts, three classes, all pictures different."""
    seed = 0
    for part, count in PARTS.items():
        for label in CLASSES:
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                photo(seed).save(tmp_path / part / label / f"{number}.jpg", quality=90)
                seed += 1
    return tmp_path


def opened(root: Path) -> DatasetSplits:
    return open_data(DataConfig(source=str(root)), seed=0)


def diagnosis(root: Path, size: int = 64, patch: int = 16) -> list[Finding]:
    return examine(opened(root), image_size=(size, size), patch_size=(patch, patch))


def grave(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "note"]


def only(findings: list[Finding]) -> Finding:
    """The one finding that is not a note."""
    (finding,) = grave(findings)
    return finding


def noted(findings: list[Finding], words: str) -> Finding:
    (finding,) = [finding for finding in findings if words in finding.message]
    assert finding.severity == "note"
    return finding


def test_a_clean_folder_gets_no_warning(root: Path) -> None:
    findings = diagnosis(root)
    assert [finding.message for finding in findings] == ["The images are 80 x 96 pixels (height x width, median)."]
    assert findings[0].severity == "note"


def test_digits_get_no_warning() -> None:
    digits = load_digits()
    source = from_arrays((digits.images * 15).astype(np.uint8), digits.target)
    order = np.random.default_rng(0).permutation(len(source))
    parts = DatasetSplits(source.subset(order[:1400]), source.subset(order[1400:]))
    findings = examine(parts, image_size=(8, 8), patch_size=(2, 2))
    assert grave(findings) == []
    assert noted(findings, "1,797 of 1,797 images are grayscale")


def test_every_picture_is_counted(root: Path) -> None:
    seen: list[int] = []
    examine(opened(root), image_size=(64, 64), on_progress=lambda: seen.append(1))
    assert len(seen) == 3 * sum(PARTS.values())


def test_corrupt_files(root: Path) -> None:
    good = (root / "train/cat/0.jpg").read_bytes()
    (root / "train/cat/1.jpg").write_bytes(good[: len(good) // 2])
    (root / "train/dog/2.jpg").write_text("not a picture")
    (root / "train/owl/3.jpg").write_bytes(b"")
    finding = only(diagnosis(root))
    assert finding.severity == "warning"
    assert finding.message == "3 of the 36 images in train cannot be read."
    names = ("cat/1.jpg", "dog/2.jpg", "owl/3.jpg")
    assert all(name in reason for name, reason in zip(names, finding.details, strict=True))


def test_a_part_without_a_readable_picture(root: Path) -> None:
    for file in (root / "test").rglob("*.jpg"):
        file.write_text("no")
    finding = only(diagnosis(root))
    assert finding.severity == "error"
    assert finding.message == "None of the 12 images in test can be read."
    assert len(finding.details) == 12


def test_nothing_at_all_can_be_read(tmp_path: Path) -> None:
    source = FileSource(["a.jpg", "b.jpg"], ["x", "y"], np.array([0, 1]), tmp_path)
    findings = examine(DatasetSplits(source), image_size=(32, 32))
    assert findings[0].severity == "error"
    assert "None of the 2 images" in findings[0].message


def test_tiny_classes(root: Path) -> None:
    for number in range(4):
        (root / f"train/owl/{number}.jpg").unlink()
    finding = only(diagnosis(root))
    assert finding.severity == "warning"
    assert finding.details == ("owl: 8",)
    assert finding.message == "1 class has fewer than 10 training images."


def test_a_class_that_is_not_measured(root: Path) -> None:
    shutil.rmtree(root / "val/dog")
    finding = only(diagnosis(root))
    assert "no image in val" in finding.message
    assert finding.details == ("dog",)


def test_a_class_that_cannot_be_learnt(root: Path) -> None:
    parts = opened(root)
    keep = np.flatnonzero(parts.train.targets != 1)
    lacking = DatasetSplits(parts.train.subset(keep), parts.val, parts.test)
    finding = only(examine(lacking, image_size=(64, 64)))
    assert finding.severity == "error"
    assert finding.details == ("dog",)
    assert "no training image" in finding.message


@pytest.mark.parametrize(("counts", "severity"), [((40, 14), None), ((45, 15), "note"), ((150, 15), "warning")])
def test_imbalance(counts: tuple[int, int], severity: str | None) -> None:
    targets = np.repeat([0, 1], counts)
    pictures = np.stack([np.asarray(photo(seed, (16, 16))) for seed in range(len(targets))])
    findings = examine(DatasetSplits(from_arrays(pictures, targets, ["many", "few"])), image_size=(16, 16))
    found = [finding for finding in findings if "times as many" in finding.message]
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    if found:
        assert found[0].details == (f"many: {counts[0]}", f"few: {counts[1]}")
        assert "data.balanced_sampling" in found[0].advice


def test_several_labels(root: Path) -> None:
    targets = np.zeros((40, 3), np.float32)
    targets[:, 0], targets[:5, 1], targets[:12, 2] = 1, 1, 1
    pictures = np.stack([np.asarray(photo(seed % 39, (16, 16))) for seed in range(40)])  # the first comes twice
    findings = examine(DatasetSplits(from_arrays(pictures, targets, CLASSES)), image_size=(16, 16))
    assert {finding.details for finding in grave(findings)} == {
        ("dog: 5",),
        ("array 0 (cat, dog, owl) = array 39 (cat)",),
    }
    assert "data.balanced_sampling" not in noted(findings, "8.0 times as many").advice


def copied(source: Path, target: Path) -> None:
    shutil.copy(source, target)


def saved_as_png(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.save(target.with_suffix(".png"))


def saved_again(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.save(target, quality=50)


def resized(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.resize((72, 60), Image.Resampling.LANCZOS).save(target, quality=90)


@pytest.mark.parametrize(
    ("copy", "how", "severity"),
    [
        (copied, "duplicate", "error"),
        (saved_as_png, "duplicate", "error"),
        (saved_again, "near-duplicate", "warning"),
        (resized, "near-duplicate", "warning"),
    ],
)
def test_the_same_picture_in_two_parts(root: Path, copy: Callable[[Path, Path], None], how: str, severity: str) -> None:
    copy(root / "train/cat/3.jpg", root / "test/cat/again.jpg")
    finding = only(diagnosis(root))
    assert finding.severity == severity
    assert finding.message == f"1 image in test has a {how} in train."
    (pair,) = finding.details
    assert "train/cat/3.jpg = " in pair
    assert "test/cat/again" in pair


def test_the_same_picture_under_two_labels(root: Path) -> None:
    copied(root / "train/cat/3.jpg", root / "train/dog/again.jpg")
    saved_again(root / "train/owl/5.jpg", root / "train/cat/again.jpg")
    same, near = grave(diagnosis(root))
    assert same.message == "1 pair of duplicates has different labels."
    assert "train/cat/3.jpg (cat) = " in same.details[0]
    assert "train/dog/again.jpg (dog)" in same.details[0]
    assert near.message == "1 pair of near-duplicates has different labels."
    assert same.severity == near.severity == "warning"


def test_the_same_picture_twice_in_a_class(root: Path) -> None:
    copied(root / "train/cat/3.jpg", root / "train/cat/again.jpg")
    findings = diagnosis(root)
    assert grave(findings) == []
    assert noted(findings, "1 pair of duplicates has the same label")


def test_drawings_that_look_alike_are_not_the_same() -> None:
    strokes = []
    for slant in range(8):
        for left in (13, 14):
            stroke = Image.new("L", (112, 112))
            ImageDraw.Draw(stroke).line((4 * left + slant, 16, 4 * left - slant, 96), fill=255, width=8)
            strokes.append(np.asarray(stroke.resize((28, 28), Image.Resampling.BOX)))
    source = from_arrays(np.stack(strokes), np.arange(16) % 2)
    assert len(candidate_pairs(np.stack([thumbnail(source, index) for index in range(16)]))) > 5  # at a first glance
    assert not [f for f in examine(DatasetSplits(source), image_size=(28, 28)) if "the same" in f.message]


def thumbnail(source: ArraySource, index: int) -> np.ndarray:
    summary = summarize_image(source, index)
    assert isinstance(summary, ImageSummary)
    return summary.thumbnail


def test_blank_pictures(root: Path) -> None:
    for number, colour in enumerate(("white", "black", "white")):
        Image.new("RGB", (96, 80), colour).save(root / f"train/cat/blank{number}.png")
    findings = diagnosis(root)
    assert len(noted(findings, "3 images are blank").details) == 3
    assert noted(findings, "1 pair of duplicates")
    assert not [f for f in findings if "nearly" in f.message]


@pytest.mark.parametrize(
    ("size", "patch", "severity", "words"),
    [
        (64, 16, None, ""),
        (48, 16, "warning", "3 x 3 patches"),
        (32, 16, "warning", "2 x 2 patches"),
        (16, 16, "error", "1 x 1 patches"),
        (60, 16, "error", "not divisible"),
    ],
)
def test_patches(root: Path, size: int, patch: int, severity: str | None, words: str) -> None:
    found = grave(diagnosis(root, size, patch))
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert all(words in finding.message for finding in found)


def test_enlarged_pictures(root: Path) -> None:
    finding = only(diagnosis(root, size=192))
    assert finding.severity == "warning"
    assert "60 images are upscaled more than 2 times to 192 x 192" in finding.message
    for file in (root / "train/cat").iterdir():
        photo(int(file.stem), (30, 40)).save(file)
    findings = diagnosis(root)
    assert grave(findings) == []
    assert len(noted(findings, "12 images are upscaled").details) == 12
    smallest = noted(findings, "The images are 80 x 96").details[0]
    assert smallest.startswith("40 x 30: ")


def test_long_pictures(root: Path) -> None:
    photo(900, (400, 80)).save(root / "train/cat/long.jpg")
    assert "long.jpg" in noted(diagnosis(root), "an aspect ratio above 3").details[0]


def test_unusual_kinds(root: Path) -> None:
    folder = root / "train/cat"
    photo(901).convert("L").save(folder / "grey.jpg", quality=90)
    photo(902).convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.asarray(photo(903).convert("L")).astype(np.uint16) * 257).save(folder / "deep.png")
    clear = photo(904)
    clear.putalpha(200)
    clear.save(folder / "clear.png")
    frames = [photo(905), photo(906)]
    frames[0].save(folder / "moves.gif", save_all=True, append_images=frames[1:])
    findings = diagnosis(root)
    assert grave(findings) == []
    expected = {"are grayscale": 2, "in CMYK": 1, "16-bit": 1, "have transparency": 1, "are animated": 1}
    assert {words: len(noted(findings, words).details) for words in expected} == expected


def test_sizes_are_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(1).save(tmp_path / "turned.jpg", exif=exif)
    photo(1).save(tmp_path / "plain.jpg")
    assert read_header(str(tmp_path / "turned.jpg")) == ((96, 80), ())
    assert read_header(str(tmp_path / "plain.jpg")) == ((80, 96), ())
    assert read_header(str(tmp_path / "missing.jpg")) == (None, ())


def test_candidates_are_those_of_an_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    originals = np.stack([np.asarray(photo(seed).resize((9, 8), Image.Resampling.BOX)) for seed in range(300)])
    changed = np.clip(originals + rng.normal(0, 3, originals.shape), 0, 255).astype(np.uint8)
    thumbnails = np.concatenate([originals, changed])
    hashes = difference_hashes(thumbnails)
    flat = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    expected = set()
    for a in range(len(hashes)):
        bits = np.array([int(x).bit_count() for x in hashes[a] ^ hashes])
        alike = (np.abs(flat - flat[a]).mean(axis=1) <= MAX_DIFFERENCE) & (
            correlation(flat, flat[a]) >= MIN_CORRELATION
        )
        expected |= {(a, int(b)) for b in np.flatnonzero((bits <= 2) & alike) if b > a}
    assert 50 < len(expected) < 300  # some copies are too much changed
    assert set(map(tuple, candidate_pairs(thumbnails).tolist())) == expected


def test_candidates_in_shards_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    thumbnails = np.stack([np.asarray(photo(seed // 2).resize((9, 8), Image.Resampling.BOX)) for seed in range(100)])
    whole = candidate_pairs(thumbnails)
    monkeypatch.setattr("patchword.doctor.near_duplicates.SHARD_SIZE", 7)
    np.testing.assert_array_equal(candidate_pairs(thumbnails), whole)
    assert len(whole) == 50


def test_pets_as_published_repeat_pictures() -> None:
    folder = shared_path("data/pets")
    sources = {}
    for part in ("train", "test"):
        files = [str(file) for file, name in list_labeled_images(folder / part) if name == "japanese_chin"]
        sources[part] = FileSource(files, ["japanese_chin"], np.zeros(len(files), np.int64))
    findings = examine(DatasetSplits(sources["train"], test=sources["test"]), image_size=(224, 224))
    finding = only(findings)
    assert finding.message == "6 images in test have a near-duplicate in train."
    assert any("japanese_chin_137.jpg" in pair and "japanese_chin_85.jpg" in pair for pair in finding.details)


TUNED = OptimConfig(name="adamw", lr=1e-3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(), None),
        (Config(init="ti16", optim=TUNED), "learning rate 0.001"),
        (Config(init="ti16", optim=OptimConfig(lr=3e-4)), None),
        (Config(init="ti16", optim=OptimConfig(name="sgd", lr=0.03)), None),
        (Config(init="ti16", optim=OptimConfig(name="sgd", lr=0.3)), "learning rate 0.3"),
        (Config(init="ti16", optim=TUNED, lora_rank=8), None),
        (Config(init="ti16", optim=TUNED, freeze=("all-but-head",)), None),
        (Config(optim=TUNED), None),
        (Config(optim=OptimConfig(lr=0.1)), "learning rate 0.1 is high for new weights"),
        (Config(optim=OptimConfig(name="sgd", lr=0.1)), None),
        (Config(init="ti16", optim=OptimConfig(lr=1e-7)), "learning rate 1e-07 is low"),
        (Config(init="ti16", optim=OptimConfig(lr=1e-3, layer_decay=0.75)), None),
        (Config(init="ti16", optim=OptimConfig(lr=1e-2, layer_decay=0.75)), "learning rate 0.01"),
        (Config(model=ViTConfig(embed_dim=96, num_heads=8, mlp_dim=192)), "attention head is 12;"),
        (Config(model=ViTConfig(image_size=32, patch_size=16)), "2 x 2 patches"),
        (Config(model=ViTConfig(image_size=32, patch_size=2, stem="conv", stem_layers=(32, 64, 64))), "2 x 2 patches"),
    ],
)
def test_configurations(config: Config, words: str | None) -> None:
    findings = examine_config(config)
    assert [finding.severity for finding in findings] == ([] if words is None else ["warning"])
    assert words is None or words in findings[0].message


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_said_of_our_own_recipes(name: str) -> None:
    assert examine_config(load_recipe(name)) == []


def test_training_and_doctor_report_what_is_odd_about_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the model that is trained: here the architecture of `init`, not the one in the given config."""
    odd = ViTConfig(image_size=8, patch_size=4, in_channels=1, embed_dim=16, depth=1, num_heads=2, mlp_dim=16)
    digits = Config(data=DataConfig(source="digits", num_workers=0), steps=1, model=odd, precision="fp32")
    train(digits, tmp_path / "first")
    tuned = digits.replace(init=str(tmp_path / "first"), model=ViTConfig(), optim=OptimConfig(lr=0.1))
    outcome = train(tuned, tmp_path / "run")
    assert outcome is not None
    words = ("learning rate 0.1 is high for pretrained weights", "only 2 x 2 patches", "attention head is 8;")
    for said in words:
        assert sum(said in note for note in outcome.notes) == 1, outcome.notes
    assert doctor_command(str(tmp_path / "run"), json=True) == 0, "it can be trained all the same"
    findings = json.loads(capsys.readouterr().out)
    assert all(any(said in finding["message"] for finding in findings) for said in words)
    assert {finding["severity"] for finding in findings} == {"note"}


def test_machine_info_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_info()
    assert json.loads(json.dumps(facts)) == facts
    assert 1 <= facts["cores"] <= (os.cpu_count() or 1)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(runtime, "_CGROUP", tmp_path)
    assert machine_info()["cores"] == 1
    assert machine_info()["memory_gib"] == 1.0
    assert "only 1.0 GiB of memory" in " ".join(f.message for f in machine_findings() if f.severity == "warning")


@pytest.mark.parametrize("threads", [1, 300])
def test_too_many_threads(threads: int) -> None:
    code = f"""
import torch
from patchword.doctor import machine_findings
torch.set_num_threads({threads})  # as in a container that may use fewer cores than it sees
print([finding.message for finding in machine_findings()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("wait for each other" in done.stdout) == (threads == 300)


def test_findings_are_shown_as_they_are() -> None:
    names = tuple(f"[red]{number}\x1b[31m\n\u202e.jpg" for number in range(7))
    findings = [Finding("note", "a note"), Finding("error", "bad [bold]", names, "do [this]")]
    file = io.StringIO()
    Console(file=file, width=100, force_terminal=False).print(findings_table(findings))
    shown = file.getvalue()
    assert "bad [bold]" in shown
    assert "do [this]" in shown
    assert "and 2 more" in shown
    assert "[red]4\\x1b[31m\\n\\u202e.jpg" in shown
    assert "[red]5" not in shown
    assert "\x1b" not in shown
    assert shown.index("error") < shown.index("note")
    assert json.loads(json.dumps(findings[1].to_json()))["details"] == list(names)


def test_escape_unprintable() -> None:
    assert escape_unprintable("naïve 日本 عربي 👩\u200d🔬") == "naïve 日本 عربي 👩\u200d🔬"
    assert escape_unprintable("a\nb\u2028\udc80\u200f") == "a\\nb\\u2028\\udc80\\u200f"
