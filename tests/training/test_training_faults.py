"""Wrong input and failures during training: they are reported early, and no results are lost."""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.runs import last_logged_step, shared_fork_server, tiny_config, wait_until, write_recipe
from patchword.config import Config, DataConfig, OptimConfig, ViTConfig
from patchword.core.io import atomic_output, unlock
from patchword.data.resolve import open_data, with_validation
from patchword.data.sources import ArraySource, DatasetSplits, from_arrays
from patchword.errors import CheckpointError, ConfigError, DataError, OutputError
from patchword.training import head_probe, resume, train
from patchword.training.callbacks import RunInfo, TrainResult
from patchword.training.loggers import LoggerCallback
from patchword.training.run_dir import LOCK_FILE, create_run_dir, lock_run_dir

TINY = ViTConfig(image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)


def make_config(**changes: Any) -> Config:
    return Config(**{"model": TINY, "batch_size": 8, "steps": 2, "data": DataConfig(num_workers=0), **changes})


def shades(count: int, labels: list[str]) -> ArraySource:
    """Return gray images whose brightness increases with the class index."""
    targets = np.arange(count) % len(labels)
    images = np.broadcast_to((targets * 200 // len(labels))[:, None, None, None], (count, 8, 8, 1)).astype(np.uint8)
    return from_arrays(images, targets, labels=labels)


def make_splits() -> DatasetSplits:
    return DatasetSplits(shades(16, ["a", "b"]), shades(8, ["a", "b"]))


def make_image_folder(folder: Path, count: int = 6) -> Path:
    for i in range(count):
        path = folder / f"{'ab'[i % 2]}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 250 * (i % 2)).save(path)
    return folder


@pytest.mark.parametrize("split", ["val", "test"])
def test_unreadable_split_is_reported_before_training(split: str, tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        make_image_folder(tmp_path / "data" / name)
    for path in (tmp_path / "data" / split).rglob("*.png"):
        path.write_bytes(b"nothing")
    config = make_config(data=DataConfig(source=str(tmp_path / "data"), num_workers=0))
    with pytest.raises(DataError, match=rf"split '{split}'.* 6 images.*/data/{split}/[ab]/\d\.png\b") as error:
        train(config, tmp_path / "run")
    assert error.value.code == "invalid_data"
    assert not (tmp_path / "run").exists()


def test_in_memory_splits_get_labels_of_training_set() -> None:
    train_set, test_set = shades(9, ["cat", "dog", "owl"]), shades(4, ["owl", "cat"])
    relabeled = with_validation(DatasetSplits(train_set, None, test_set), 0.34, 0).test
    assert relabeled is not None
    assert relabeled.labels == ("cat", "dog", "owl")
    assert relabeled.targets.tolist() == [2, 0, 2, 0]
    with pytest.raises(DataError, match=r"test set\b.*\btraining set\b[^']*'cow'[^']*'cat', 'dog', 'owl'") as error:
        with_validation(DatasetSplits(train_set, None, shades(4, ["cow", "cat"])), 0.34, 0)
    assert error.value.code == "invalid_data"


@pytest.mark.parametrize("split", ["val", "test"])
def test_training_images_are_refused_as_held_out_split(split: str, tmp_path: Path) -> None:
    here, there = make_image_folder(tmp_path / "here"), make_image_folder(tmp_path / "there")
    with pytest.raises(DataError, match=rf"data\.{split}=\S+/here: 6\b.*\b6 images\b.*/here/[ab]/\d\.png\b") as error:
        open_data(DataConfig(source=str(here), **{split: f"{tmp_path}/there/../here"}), 0)
    assert error.value.code == "invalid_data"
    opened = open_data(DataConfig(source=str(here), **{split: str(there)}), 0)  # the same names, other images
    assert len(opened.as_dict()[split]) == 6


@pytest.mark.parametrize("kind", ["working_directory", "link"])
def test_train_accepts_empty_directory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a mounted volume, which can be neither removed nor renamed."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    out = Path(".") if kind == "working_directory" else tmp_path / "link"
    inode = (tmp_path / "empty").stat().st_ino
    result = train(make_config(), out, splits=make_splits())
    assert result is not None
    assert (tmp_path / "empty/model.json").is_file()
    assert (tmp_path / "empty").stat().st_ino == inode
    with pytest.raises(ConfigError) as refused:
        create_run_dir(make_config(), out)
    assert refused.value.code == "run_exists"
    for path in (tmp_path / "empty").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=r"\bno model\b.*\bnowhere/at/all\b") as failed:
        train(make_config(init="nowhere/at/all"), out, splits=make_splits())
    assert failed.value.code == "invalid_checkpoint"
    assert list((tmp_path / "empty").iterdir()) == [], "a run that cannot start must leave nothing behind"


def test_atomic_output_does_not_replace_directory_created_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as error, atomic_output(tmp_path / "run") as temporary:
        temporary.mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "run/other").touch()
    assert error.value.code == "cannot_write"
    assert str(tmp_path / "run") in str(error.value)
    assert os.strerror(errno.ENOTEMPTY) in str(error.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_run_is_locked_while_it_trains(tmp_path: Path) -> None:
    fork_server = shared_fork_server()
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.py", tiny_config(steps=100_000))
    child = fork_server.start("train", recipe, "--out", run)
    try:
        assert wait_until(lambda: last_logged_step(run) >= 10), child.output()
        second = fork_server.start("resume", run)
        assert second.wait() == 2 and second.error_code() == "run_locked", second.output()
        assert str(run) in second.output()
        before = last_logged_step(run)
        assert wait_until(lambda: last_logged_step(run) > before), "the first process stopped training"
    finally:
        child.send_signal(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM
    assert not (run / LOCK_FILE).exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == sorted(set(steps))


def test_lock_is_taken_before_checkpoints_are_read(tmp_path: Path) -> None:
    """The process that trains the run may be replacing its checkpoints, so they must not be judged."""
    train(make_config(), tmp_path / "run", splits=make_splits())
    (tmp_path / "run/report.html").unlink()  # unfinished
    for manifest in (tmp_path / "run/checkpoints").rglob("state.json"):
        manifest.write_bytes(b"{}")
    lock = lock_run_dir(tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        resume(tmp_path / "run", splits=make_splits())
    assert error.value.code == "run_locked"
    unlock(lock)
    with pytest.raises(CheckpointError) as error:
        resume(tmp_path / "run", splits=make_splits())
    assert error.value.code == "checkpoints_damaged"


def test_train_restores_number_of_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(make_config(num_threads=1), tmp_path / "run", splits=make_splits())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_logger_that_fails_at_end_does_not_fail_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class BrokenLogger(LoggerCallback):
        def start(self, info: RunInfo) -> None: ...

        def send(self, values: dict[str, float], step: int) -> None: ...

        def finish(self, result: TrainResult | None) -> None:
            raise ConnectionError("no network")

    assert train(make_config(), tmp_path / "run", splits=make_splits(), callbacks=(BrokenLogger(),)) is not None
    assert re.search(r"\bBrokenLogger\b.*\bno network\b", capsys.readouterr().err)


def test_head_probe_on_subsampled_validation_set_has_all_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Image folders are sorted by class, so the first images would all have the same class."""
    val_targets: list[torch.Tensor] = []
    fit_best_logistic = head_probe.fit_best_logistic

    def recorded_fit(x: Any, y: Any, x_val: Any, y_val: torch.Tensor, *args: Any) -> Any:
        val_targets.append(y_val)
        return fit_best_logistic(x, y, x_val, y_val, *args)

    monkeypatch.setattr(head_probe, "MAX_IMAGES", 12)
    monkeypatch.setattr(head_probe, "fit_best_logistic", recorded_fit)
    source = shades(60, ["a", "b", "c"])
    by_class = source.subset(np.argsort(source.targets, kind="stable"))
    train(make_config(), tmp_path / "base", splits=DatasetSplits(source, by_class))
    config = make_config(init=str(tmp_path / "base"), head_init="probe", optim=OptimConfig(lr=1e-5))
    relabeled = DatasetSplits(*(ArraySource(s.images, ["x", "y", "z"], s.targets) for s in (source, by_class)))
    train(config, tmp_path / "run", splits=relabeled)
    assert len(val_targets) == 1
    assert len(val_targets[0]) == 12
    assert val_targets[0].unique().tolist() == [0, 1, 2]


def test_atomic_output_keeps_old_model_if_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames, and also if restoring the old model fails."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "model.json").write_text("old")
    replace, calls = os.replace, []

    def interrupted(source: Any, destination: Any) -> None:
        calls.append(destination)
        if len(calls) == 1:
            replace(source, destination)
            raise KeyboardInterrupt
        if restore_fails:
            raise OSError("cannot restore")
        replace(source, destination)

    for restore_fails in (False, True):
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OutputError)):
            patch.setattr(os, "replace", interrupted)
            with atomic_output(target, overwrite=True, replaceable=("model.json",)) as temporary:
                temporary.mkdir()
        (model_json,) = tmp_path.rglob("model.json")
        assert model_json.read_text() == "old"
        assert (model_json.parent == target) == (not restore_fails)
