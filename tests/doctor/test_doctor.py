"""The doctor on datasets, configs and machines: defects are found, and clean data have no problems."""

import io
import json
import os
import re
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

IMAGES_PER_CLASS = {"train": 12, "val": 4, "test": 4}
CLASSES = ("cat", "dog", "owl")


def photo(seed: int, size: tuple[int, int] = (96, 80)) -> Image.Image:
    """A photo-like image: smooth colored areas and a little noise, different for each seed."""
    rng = np.random.default_rng(seed)
    areas = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.normal(0, 6, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(areas) + noise, 0, 255).astype(np.uint8))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clean dataset: three splits, three classes, no duplicates."""
    seed = 0
    for split, count in IMAGES_PER_CLASS.items():
        for label in CLASSES:
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                photo(seed).save(tmp_path / split / label / f"{number}.jpg", quality=90)
                seed += 1
    return tmp_path


def open_splits(root: Path) -> DatasetSplits:
    return open_data(DataConfig(source=str(root)), seed=0)


def examine_folder(root: Path, size: int = 64, patch: int = 16) -> list[Finding]:
    return examine(open_splits(root), image_size=(size, size), patch_size=(patch, patch))


def problems(findings: list[Finding]) -> list[Finding]:
    """Return all findings but notes."""
    return [finding for finding in findings if finding.severity != "note"]


def only_problem(findings: list[Finding]) -> Finding:
    """Return the one finding that is not a note."""
    (finding,) = problems(findings)
    return finding


def only_note(findings: list[Finding], code: str) -> Finding:
    """Return the one finding with this code, which must be a note."""
    (finding,) = [finding for finding in findings if finding.code == code]
    assert finding.severity == "note"
    return finding


def numbers(text: str) -> list[str]:
    """Return the numbers in a text, such as ["1,797", "0.001"]."""
    return re.findall(r"\d+(?:[.,]\d+)*(?:e-\d+)?", text)


def sizes(finding: Finding) -> list[str]:
    """Return the sizes that a message names, such as ["32 x 32", "16 x 16"]."""
    return re.findall(r"\d+ x \d+", finding.message)


def test_clean_dataset_has_no_problems(root: Path) -> None:
    (finding,) = examine_folder(root)
    assert finding.severity == "note"
    assert sizes(finding) == ["80 x 96"]


def test_digits_have_no_problems() -> None:
    digits = load_digits()
    source = from_arrays((digits.images * 15).astype(np.uint8), digits.target)
    order = np.random.default_rng(0).permutation(len(source))
    splits = DatasetSplits(source.subset(order[:1400]), source.subset(order[1400:]))
    findings = examine(splits, image_size=(8, 8), patch_size=(2, 2))
    assert problems(findings) == []
    assert numbers(only_note(findings, "gray_images").message) == ["1,797", "1,797"]


def test_progress_is_reported_for_every_image(root: Path) -> None:
    calls: list[None] = []
    examine(open_splits(root), image_size=(64, 64), on_progress=lambda: calls.append(None))
    assert len(calls) == 3 * sum(IMAGES_PER_CLASS.values())


def test_corrupt_files_are_listed(root: Path) -> None:
    good = (root / "train/cat/0.jpg").read_bytes()
    (root / "train/cat/1.jpg").write_bytes(good[: len(good) // 2])
    (root / "train/dog/2.jpg").write_text("not an image")
    (root / "train/owl/3.jpg").write_bytes(b"")
    finding = only_problem(examine_folder(root))
    assert (finding.severity, finding.code) == ("warning", "unreadable_images")
    assert numbers(finding.message) == ["3", "36"]
    assert "train" in finding.message
    names = ("cat/1.jpg", "dog/2.jpg", "owl/3.jpg")
    assert all(name in reason for name, reason in zip(names, finding.details, strict=True))


def test_split_without_readable_images_is_an_error(root: Path) -> None:
    for file in (root / "test").rglob("*.jpg"):
        file.write_text("no")
    finding = only_problem(examine_folder(root))
    assert (finding.severity, finding.code) == ("error", "unreadable_images")
    assert numbers(finding.message) == ["12"]
    assert "test" in finding.message
    assert len(finding.details) == 12


def test_dataset_without_readable_images_is_an_error(tmp_path: Path) -> None:
    source = FileSource(["a.jpg", "b.jpg"], ["x", "y"], np.array([0, 1]), tmp_path)
    findings = examine(DatasetSplits(source), image_size=(32, 32))
    assert (findings[0].severity, findings[0].code) == ("error", "unreadable_images")
    assert len(findings[0].details) == 2


def test_small_class_is_a_warning(root: Path) -> None:
    for number in range(4):
        (root / f"train/owl/{number}.jpg").unlink()
    finding = only_problem(examine_folder(root))
    assert (finding.severity, finding.code) == ("warning", "small_classes")
    assert finding.details == ("owl: 8",)
    assert numbers(finding.message) == ["1", "10"]


def test_class_missing_in_val_is_a_warning(root: Path) -> None:
    shutil.rmtree(root / "val/dog")
    finding = only_problem(examine_folder(root))
    assert (finding.severity, finding.code) == ("warning", "missing_classes")
    assert "val" in finding.message
    assert finding.details == ("dog",)


def test_class_without_training_images_is_an_error(root: Path) -> None:
    splits = open_splits(root)
    without_dog = splits.train.subset(np.flatnonzero(splits.train.targets != 1))
    finding = only_problem(examine(DatasetSplits(without_dog, splits.val, splits.test), image_size=(64, 64)))
    assert (finding.severity, finding.code) == ("error", "empty_classes")
    assert finding.details == ("dog",)


@pytest.mark.parametrize(("counts", "severity"), [((40, 14), None), ((45, 15), "note"), ((150, 15), "warning")])
def test_imbalance_severity_depends_on_ratio(counts: tuple[int, int], severity: str | None) -> None:
    targets = np.repeat([0, 1], counts)
    images = np.stack([np.asarray(photo(seed, (16, 16))) for seed in range(len(targets))])
    findings = examine(DatasetSplits(from_arrays(images, targets, ["many", "few"])), image_size=(16, 16))
    imbalance = [finding for finding in findings if finding.code == "class_imbalance"]
    assert [finding.severity for finding in imbalance] == ([severity] if severity else [])
    if imbalance:
        assert imbalance[0].details == (f"many: {counts[0]}", f"few: {counts[1]}")
        assert numbers(imbalance[0].message) == [f"{counts[0] / counts[1]:.1f}"]
        assert {"data.balanced_sampling", "class_weights"} <= set(imbalance[0].advice.split())


def test_multi_label_findings() -> None:
    targets = np.zeros((40, 3), np.float32)
    targets[:, 0], targets[:5, 1], targets[:12, 2] = 1, 1, 1
    images = np.stack([np.asarray(photo(seed % 39, (16, 16))) for seed in range(40)])  # the last repeats the first
    findings = examine(DatasetSplits(from_arrays(images, targets, CLASSES)), image_size=(16, 16))
    assert {finding.details for finding in problems(findings)} == {
        ("dog: 5",),
        ("array 0 (cat, dog, owl) = array 39 (cat)",),
    }
    imbalance = only_note(findings, "class_imbalance")
    assert numbers(imbalance.message) == ["8.0"]
    assert "class_weights" in imbalance.advice
    assert "data.balanced_sampling" not in imbalance.advice


def copy_file(source: Path, target: Path) -> None:
    shutil.copy(source, target)


def save_as_png(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.save(target.with_suffix(".png"))


def save_at_low_quality(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.save(target, quality=50)


def save_resized(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.resize((72, 60), Image.Resampling.LANCZOS).save(target, quality=90)


@pytest.mark.parametrize(
    ("copy", "kind", "severity"),
    [
        (copy_file, "duplicate", "error"),
        (save_as_png, "duplicate", "error"),
        (save_at_low_quality, "near_duplicate", "warning"),
        (save_resized, "near_duplicate", "warning"),
    ],
)
def test_duplicate_across_splits(root: Path, copy: Callable[[Path, Path], None], kind: str, severity: str) -> None:
    copy(root / "train/cat/3.jpg", root / "test/cat/copy.jpg")
    finding = only_problem(examine_folder(root))
    assert (finding.severity, finding.code) == (severity, f"{kind}_across_splits")
    assert numbers(finding.message) == ["1"]
    (pair,) = finding.details
    assert "train/cat/3.jpg = " in pair
    assert "test/cat/copy" in pair


def test_duplicates_with_different_labels(root: Path) -> None:
    copy_file(root / "train/cat/3.jpg", root / "train/dog/copy.jpg")
    save_at_low_quality(root / "train/owl/5.jpg", root / "train/cat/copy.jpg")
    equal, near = problems(examine_folder(root))
    assert equal.code == "duplicate_labels_differ"
    assert "train/cat/3.jpg (cat) = " in equal.details[0]
    assert "train/dog/copy.jpg (dog)" in equal.details[0]
    assert near.code == "near_duplicate_labels_differ"
    assert "train/cat/copy.jpg (cat) = " in near.details[0]
    assert "train/owl/5.jpg (owl)" in near.details[0]
    assert equal.severity == near.severity == "warning"


def test_duplicate_within_class_is_a_note(root: Path) -> None:
    copy_file(root / "train/cat/3.jpg", root / "train/cat/copy.jpg")
    findings = examine_folder(root)
    assert problems(findings) == []
    (pair,) = only_note(findings, "duplicate_within_split").details
    assert "train/cat/3.jpg = " in pair
    assert "train/cat/copy.jpg" in pair


def test_similar_drawings_are_not_duplicates() -> None:
    strokes = []
    for slant in range(8):
        for left in (13, 14):
            stroke = Image.new("L", (112, 112))
            ImageDraw.Draw(stroke).line((4 * left + slant, 16, 4 * left - slant, 96), fill=255, width=8)
            strokes.append(np.asarray(stroke.resize((28, 28), Image.Resampling.BOX)))
    source = from_arrays(np.stack(strokes), np.arange(16) % 2)
    assert len(candidate_pairs(np.stack([thumbnail(source, index) for index in range(16)]))) > 5
    findings = examine(DatasetSplits(source), image_size=(28, 28))
    assert not [finding for finding in findings if "duplicate" in finding.code]


def thumbnail(source: ArraySource, index: int) -> np.ndarray:
    summary = summarize_image(source, index)
    assert isinstance(summary, ImageSummary)
    return summary.thumbnail


def test_blank_images_are_noted(root: Path) -> None:
    for number, color in enumerate(("white", "black", "white")):
        Image.new("RGB", (96, 80), color).save(root / f"train/cat/blank{number}.png")
    findings = examine_folder(root)
    assert len(only_note(findings, "blank_images").details) == 3
    assert len(only_note(findings, "duplicate_within_split").details) == 1
    assert not [finding for finding in findings if "near_duplicate" in finding.code]


@pytest.mark.parametrize(
    ("size", "severity", "named"),
    [
        (64, None, None),
        (48, "warning", ["48 x 48", "16 x 16", "3 x 3"]),
        (32, "warning", ["32 x 32", "16 x 16", "2 x 2"]),
        (16, "error", ["16 x 16", "16 x 16", "1 x 1"]),
        (60, "error", ["60 x 60", "16 x 16"]),  # not divisible
    ],
)
def test_number_of_patches(root: Path, size: int, severity: str | None, named: list[str] | None) -> None:
    findings = problems(examine_folder(root, size, patch=16))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert [sizes(finding) for finding in findings] == ([named] if named else [])


def test_upscaled_images(root: Path) -> None:
    finding = only_problem(examine_folder(root, size=192))
    assert (finding.severity, finding.code) == ("warning", "upscaled_images")
    assert numbers(finding.message)[:2] == ["60", "2"]
    assert sizes(finding) == ["192 x 192"]
    for file in (root / "train/cat").iterdir():
        photo(int(file.stem), (30, 40)).save(file)
    findings = examine_folder(root)
    assert problems(findings) == []
    assert len(only_note(findings, "upscaled_images").details) == 12
    smallest = only_note(findings, "image_sizes").details[0]
    assert smallest.startswith("40 x 30: ")


def test_elongated_images_are_noted(root: Path) -> None:
    photo(900, (400, 80)).save(root / "train/cat/long.jpg")
    assert "long.jpg" in only_note(examine_folder(root), "elongated_images").details[0]


def test_unusual_formats_are_noted(root: Path) -> None:
    folder = root / "train/cat"
    photo(901).convert("L").save(folder / "gray.jpg", quality=90)
    photo(902).convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.asarray(photo(903).convert("L")).astype(np.uint16) * 257).save(folder / "16bit.png")
    transparent = photo(904)
    transparent.putalpha(200)
    transparent.save(folder / "transparent.png")
    frames = [photo(905), photo(906)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    findings = examine_folder(root)
    assert problems(findings) == []
    expected = {"gray": 2, "cmyk": 1, "deep": 1, "transparent": 1, "animated": 1}
    assert {kind: len(only_note(findings, f"{kind}_images").details) for kind in expected} == expected


def test_header_size_respects_exif_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(1).save(tmp_path / "rotated.jpg", exif=exif)
    photo(1).save(tmp_path / "plain.jpg")
    assert read_header(str(tmp_path / "rotated.jpg")) == ((96, 80), ())
    assert read_header(str(tmp_path / "plain.jpg")) == ((80, 96), ())
    assert read_header(str(tmp_path / "missing.jpg")) == (None, ())


def test_candidate_pairs_match_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    originals = np.stack([np.asarray(photo(seed).resize((9, 8), Image.Resampling.BOX)) for seed in range(300)])
    changed = np.clip(originals + rng.normal(0, 3, originals.shape), 0, 255).astype(np.uint8)
    thumbnails = np.concatenate([originals, changed])
    hashes = difference_hashes(thumbnails)
    flat = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    expected = set()
    for a in range(len(hashes)):
        bits = np.array([int(x).bit_count() for x in hashes[a] ^ hashes])
        similar = (np.abs(flat - flat[a]).mean(axis=1) <= MAX_DIFFERENCE) & (
            correlation(flat, flat[a]) >= MIN_CORRELATION
        )
        expected |= {(a, int(b)) for b in np.flatnonzero((bits <= 2) & similar) if b > a}
    assert 50 < len(expected) < 300  # some copies differ too much
    assert set(map(tuple, candidate_pairs(thumbnails).tolist())) == expected


def test_candidate_pairs_are_independent_of_shard_size(monkeypatch: pytest.MonkeyPatch) -> None:
    thumbnails = np.stack([np.asarray(photo(seed // 2).resize((9, 8), Image.Resampling.BOX)) for seed in range(100)])
    whole = candidate_pairs(thumbnails)
    monkeypatch.setattr("patchword.doctor.near_duplicates.SHARD_SIZE", 7)
    np.testing.assert_array_equal(candidate_pairs(thumbnails), whole)
    assert len(whole) == 50


def test_pets_near_duplicates_are_found() -> None:
    folder = shared_path("data/pets")
    sources = {}
    for split in ("train", "test"):
        files = [str(file) for file, name in list_labeled_images(folder / split) if name == "japanese_chin"]
        sources[split] = FileSource(files, ["japanese_chin"], np.zeros(len(files), np.int64))
    splits = DatasetSplits(sources["train"], test=sources["test"])
    finding = only_problem(examine(splits, image_size=(224, 224)))
    assert finding.code == "near_duplicate_across_splits"
    assert numbers(finding.message) == ["6"]
    assert any("japanese_chin_137.jpg" in pair and "japanese_chin_85.jpg" in pair for pair in finding.details)


HIGH_LR = OptimConfig(name="adamw", lr=1e-3)
LOW_LR = OptimConfig(lr=1e-7)


@pytest.mark.parametrize(
    ("config", "code", "suggestion"),
    [
        (Config(), None, ""),
        (Config(init="ti16", optim=HIGH_LR), "high_learning_rate", "optim.lr to 0.0003 "),
        (Config(init="ti16", optim=OptimConfig(lr=3e-4)), None, ""),
        (Config(init="ti16", optim=OptimConfig(name="sgd", lr=0.03)), None, ""),
        (Config(init="ti16", optim=OptimConfig(name="sgd", lr=0.3)), "high_learning_rate", "optim.lr to 0.1 "),
        (Config(init="ti16", optim=HIGH_LR, lora_rank=8), None, ""),
        (Config(init="ti16", optim=HIGH_LR, freeze=("all-but-head",)), None, ""),
        (Config(optim=HIGH_LR), None, ""),
        (Config(optim=OptimConfig(lr=0.1)), "high_learning_rate", "optim.lr to 0.01 "),
        (Config(optim=OptimConfig(name="sgd", lr=0.1)), None, ""),
        (Config(init="ti16", optim=LOW_LR), "low_learning_rate", "optim.lr to 1e-06 "),
        (Config(init="ti16", optim=OptimConfig(lr=1e-3, layer_decay=0.75)), None, ""),
        (
            Config(init="ti16", optim=OptimConfig(lr=1e-2, layer_decay=0.75)),
            "high_learning_rate",
            "optim.lr to 0.003 ",
        ),
        (Config(model=ViTConfig(embed_dim=96, num_heads=8, mlp_dim=192)), "narrow_heads", "model.num_heads to 3,"),
        (Config(model=ViTConfig(image_size=32, patch_size=16)), "few_patches", "model.patch_size"),
        (
            Config(model=ViTConfig(image_size=32, patch_size=2, stem="conv", stem_layers=(32, 64, 64))),
            "few_patches",
            "model.patch_size",
        ),
    ],
)
def test_examine_config(config: Config, code: str | None, suggestion: str) -> None:
    findings = examine_config(config)
    assert [(finding.severity, finding.code) for finding in findings] == ([("warning", code)] if code else [])
    assert all(suggestion in finding.advice for finding in findings)


@pytest.mark.parametrize("name", RECIPES)
def test_builtin_recipes_have_no_findings(name: str) -> None:
    assert examine_config(load_recipe(name)) == []


def test_train_and_doctor_report_unusual_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the model that is trained: here the architecture of `init`, not the one in the given config."""
    unusual = ViTConfig(image_size=8, patch_size=4, in_channels=1, embed_dim=16, depth=1, num_heads=2, mlp_dim=16)
    digits = Config(data=DataConfig(source="digits", num_workers=0), steps=1, model=unusual, precision="fp32")
    train(digits, tmp_path / "base")
    finetune = digits.replace(init=str(tmp_path / "base"), model=ViTConfig(), optim=OptimConfig(lr=0.1))
    result = train(finetune, tmp_path / "run")
    assert result is not None
    notes = [note for note in result.notes if note.code == "odd_setting"]
    for field in ("optim.lr", "model.patch_size", "model.num_heads"):
        assert sum(field in note for note in notes) == 1, notes
    assert len(notes) == 3
    assert doctor_command(str(tmp_path / "run"), json=True) == 0, "the run is valid"
    findings = json.loads(capsys.readouterr().out)
    assert {finding["code"] for finding in findings} >= {"high_learning_rate", "few_patches", "narrow_heads"}
    assert {finding["severity"] for finding in findings} == {"note"}


def test_machine_info_is_json_and_respects_cgroup_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = machine_info()
    assert json.loads(json.dumps(info)) == info
    assert 1 <= info["cores"] <= (os.cpu_count() or 1)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(runtime, "_CGROUP", tmp_path)
    assert machine_info()["cores"] == 1
    assert machine_info()["memory_gib"] == 1.0
    (little_memory,) = [finding for finding in machine_findings() if finding.code == "little_memory"]
    assert numbers(little_memory.message) == ["1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 300])
def test_more_threads_than_cores_is_a_warning(num_threads: int) -> None:
    code = f"""
import torch
from patchword.doctor import machine_findings
torch.set_num_threads({num_threads})  # as in a container with a CPU quota
print([finding.advice for finding in machine_findings() if finding.code == 'too_many_threads'])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("OMP_NUM_THREADS" in result.stdout) == (num_threads == 300)


def test_findings_table_escapes_markup_and_control_characters() -> None:
    names = tuple(f"[red]{number}\x1b[31m\n\u202e.jpg" for number in range(7))
    findings = [Finding("note", "a", "a note"), Finding("error", "b", "bad [bold]", names, "do [this]")]
    file = io.StringIO()
    Console(file=file, width=100, force_terminal=False).print(findings_table(findings))
    output = file.getvalue()
    assert "bad [bold]" in output
    assert "do [this]" in output
    assert "2 more" in output
    assert "[red]4\\x1b[31m\\n\\u202e.jpg" in output
    assert "[red]5" not in output
    assert "\x1b" not in output
    assert output.index("error") < output.index("note")
    assert json.loads(json.dumps(findings[1].to_json()))["details"] == list(names)


def test_escape_unprintable() -> None:
    assert escape_unprintable("naïve 日本 عربي 👩\u200d🔬") == "naïve 日本 عربي 👩\u200d🔬"
    assert escape_unprintable("a\nb\u2028\udc80\u200f") == "a\\nb\\u2028\\udc80\\u200f"
