"""What training is given by mistake, or meets while it goes: told at once, and nothing lost."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.runs import Nursery, last_step, shared_nursery, tiny, until, write_recipe
from patchword.config import Config, DataConfig, OptimConfig, ViTConfig
from patchword.core.io import atomic_output
from patchword.data.resolve import open_data, with_validation
from patchword.data.sources import ArraySource, DatasetSplits, from_arrays
from patchword.errors import CheckpointError, ConfigError, DataError, OutputError
from patchword.training import head_probe as head
from patchword.training import train
from patchword.training.callbacks import RunInfo, TrainResult
from patchword.training.loggers import LoggerCallback
from patchword.training.run_dir import LOCK_FILE, create_run_dir

TINY = ViTConfig(image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)


def config(**changes: Any) -> Config:
    return Config(**{"model": TINY, "batch_size": 8, "steps": 2, "data": DataConfig(num_workers=0), **changes})


def shades(count: int, labels: list[str]) -> ArraySource:
    """Grey pictures, the brighter the later their class."""
    targets = np.arange(count) % len(labels)
    images = np.broadcast_to((targets * 200 // len(labels))[:, None, None, None], (count, 8, 8, 1)).astype(np.uint8)
    return from_arrays(images, targets, labels=labels)


def paint(folder: Path, count: int = 6) -> Path:
    for i in range(count):
        path = folder / f"{'ab'[i % 2]}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 250 * (i % 2)).save(path)
    return folder


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_part_that_cannot_be_read_is_told_before_the_first_step(part: str, tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        paint(tmp_path / "data" / name)
    for path in (tmp_path / "data" / part).rglob("*.png"):
        path.write_bytes(b"nothing")
    run = config(data=DataConfig(source=str(tmp_path / "data"), num_workers=0))
    with pytest.raises(DataError, match=f"The split '{part}' cannot be read: none of the 6 images"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parts_in_memory_are_brought_to_the_same_labels() -> None:
    train_part, test_part = shades(9, ["cat", "dog", "owl"]), shades(4, ["owl", "cat"])
    found = with_validation(DatasetSplits(train_part, None, test_part), 0.34, 0).test
    assert found is not None
    assert found.labels == ("cat", "dog", "owl")
    assert found.targets.tolist() == [2, 0, 2, 0]
    with pytest.raises(DataError, match="classes that the training set lacks: 'cow'"):
        with_validation(DatasetSplits(train_part, None, shades(4, ["cow", "cat"])), 0.34, 0)


@pytest.mark.parametrize("part", ["val", "test"])
def test_pictures_that_are_learnt_from_measure_nothing(part: str, tmp_path: Path) -> None:
    here, there = paint(tmp_path / "here"), paint(tmp_path / "there")
    with pytest.raises(DataError, match=rf"data\.{part}.*6 of its 6 images are also in the training set"):
        open_data(DataConfig(source=str(here), **{part: f"{tmp_path}/there/../here"}), 0)
    found = open_data(DataConfig(source=str(here), **{part: str(there)}), 0)  # the same names, other pictures
    assert len(found.as_dict()[part]) == 6


@pytest.mark.parametrize("kind", ["plain", "link"])
def test_a_run_may_go_into_an_empty_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a volume, which can be neither removed nor renamed."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    out = Path(".") if kind == "plain" else tmp_path / "link"
    identity = (tmp_path / "empty").stat().st_ino
    outcome = train(config(), out, splits=DatasetSplits(shades(16, ["a", "b"]), shades(8, ["a", "b"])))
    assert outcome is not None
    assert (tmp_path / "empty/model.json").is_file()
    assert (tmp_path / "empty").stat().st_ino == identity
    with pytest.raises(ConfigError, match="never overwritten"):
        create_run_dir(config(), out)
    for path in (tmp_path / "empty").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match="no model at"):
        train(config(init="nowhere/at/all"), out, splits=DatasetSplits(shades(16, ["a", "b"]), shades(8, ["a", "b"])))
    assert list((tmp_path / "empty").iterdir()) == [], "a run that cannot begin leaves nothing in it"


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nothing was changed"), atomic_output(tmp_path / "run") as made:
        made.mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "run/of another").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["of another"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_belongs_to_one_process(tmp_path: Path) -> None:
    nursery: Nursery = shared_nursery()
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", tiny(steps=100_000))
    child = nursery.run("train", recipe, "--out", run)
    try:
        assert until(lambda: last_step(run) >= 10), child.output()
        second = nursery.run("resume", run)
        assert second.wait() == 2 and "Another process is training" in second.output(), second.output()
        before = last_step(run)
        assert until(lambda: last_step(run) > before), "the first goes on"
    finally:
        child.signal(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM
    assert not (run / LOCK_FILE).exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == sorted(set(steps))


def test_threads_are_as_they_were_after_a_run(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(
            config(num_threads=1), tmp_path / "run", splits=DatasetSplits(shades(16, ["a", "b"]), shades(8, ["a", "b"]))
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_logger_that_breaks_at_the_end_does_not_break_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(LoggerCallback):
        def start(self, briefing: RunInfo) -> None: ...

        def send(self, values: dict[str, float], step: int) -> None: ...

        def finish(self, outcome: TrainResult | None) -> None:
            raise ConnectionError("no network")

    data = DatasetSplits(shades(16, ["a", "b"]), shades(8, ["a", "b"]))
    assert train(config(), tmp_path / "run", splits=data, callbacks=(Broken(),)) is not None
    assert "Broken failed" in capsys.readouterr().err


def test_a_probe_that_sees_a_part_of_validation_sees_all_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are sorted by class, so the first pictures would all be of one."""
    seen: list[torch.Tensor] = []
    fit = head.fit_best_logistic
    monkeypatch.setattr(head, "MAX_IMAGES", 12)
    monkeypatch.setattr(
        head, "fit_best_logistic", lambda x, y, u, v, *rest: (seen.append(v), fit(x, y, u, v, *rest))[1]
    )
    source = shades(60, ["a", "b", "c"])
    by_class = source.subset(np.argsort(source.targets, kind="stable"))
    data = DatasetSplits(source, by_class)
    train(config(), tmp_path / "base", splits=data)
    run = config(init=str(tmp_path / "base"), head_init="probe", optim=OptimConfig(lr=1e-5))
    relabelled = DatasetSplits(*(ArraySource(s.images, ["x", "y", "z"], s.targets) for s in (source, by_class)))
    train(run, tmp_path / "run", splits=relabelled)
    assert len(seen) == 1
    assert len(seen[0]) == 12
    assert seen[0].unique().tolist() == [0, 1, 2]


def test_the_old_model_survives_an_interrupted_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renamings, too, and where the way back fails as well."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "model.json").write_text("old")
    rename, calls = os.replace, []

    def interrupted(source: Any, place: Any) -> None:
        calls.append(place)
        if len(calls) == 1:
            rename(source, place)
            raise KeyboardInterrupt
        if fails_back:
            raise OSError("no way back")
        rename(source, place)

    for fails_back in (False, True):
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OutputError)):
            patch.setattr(os, "replace", interrupted)
            with atomic_output(target, overwrite=True, replaceable=("model.json",)) as made:
                made.mkdir()
        (kept,) = tmp_path.rglob("model.json")
        assert kept.read_text() == "old"
        assert (kept.parent == target) == (not fails_back)
