"""`patchword index` and what is opened by it: the same data as without an index, at any size, and never stale."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from helpers.command import run_in_process
from helpers.load_script import ROOT
from helpers.tar_shards import contents, encode_image, samples, write_shards, write_tar
from patchword.config import Config, DataConfig
from patchword.data.build_index import build_index
from patchword.data.formats.indexed_shards import IndexedSource
from patchword.data.formats.webdataset import ShardSource
from patchword.data.lane_sampler import LaneSampler, make_sampler
from patchword.data.resolve import open_data, resolve_dataset
from patchword.data.sampler import BalancedSampler, ShuffledSampler
from patchword.data.shard_index import INDEX_FILE, ShardIndex
from patchword.data.sources import fingerprint
from patchword.errors import ConfigError, DataError, ImageError, OutputError, StorageError

SIZES = {"train-000": 9, "train-001": 4, "val-000": 5, "more/train-002": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", SIZES)


def train_source(reference: Path | str, **options: bool) -> IndexedSource:
    source = resolve_dataset(str(reference), **options).splits["train"]
    assert isinstance(source, IndexedSource)
    return source


# ---- the same data as without an index


def test_index_changes_nothing_but_the_order(folder: Path) -> None:
    before = open_data(DataConfig(source=str(folder)), 0)
    assert isinstance(before.train, ShardSource)
    report = build_index(str(folder))
    assert (report.written, report.num_samples, report.num_classes) == (True, 25, 3)
    assert report.samples_by_split() == {"train": 20, "val": 5}
    after = open_data(DataConfig(source=str(folder)), 0)
    assert isinstance(after.train, IndexedSource)
    for name, source in before.as_dict().items():
        found = after.as_dict()[name]
        assert sorted(contents(found)) == sorted(contents(source))
        assert found.labels == source.labels
    assert after.train.name(0) == str(folder / after.train.key(0))


def test_other_programs_can_read_the_index(folder: Path) -> None:
    build_index(str(folder))
    rows = pa.ipc.open_file(folder / INDEX_FILE).read_all().to_pylist()
    assert set(rows[0]) == {"shard", "offset", "size", "key", "label"}
    for row in rows[::7]:
        data = (folder / row["shard"]).read_bytes()[row["offset"] : row["offset"] + row["size"]]
        assert data == encode_image(int(row["key"][:5]))
        assert row["label"] == f"class {int(row['key'][:5]) % 3}"


def test_patterns_choose_shards_of_the_index(folder: Path) -> None:
    build_index(str(folder))
    for pattern, count in {
        "train-{000..001}.tar": 13,
        "train-*.tar": 13,
        "more/train-*.tar": 7,
        "*/*.tar": 7,
        "train-001.tar": 4,
    }.items():
        assert len(resolve_dataset(str(folder / pattern)).splits["train"]) == count
        assert isinstance(resolve_dataset(str(folder / pattern)).splits["train"], IndexedSource) == (
            "more" not in pattern
        )
    with pytest.raises(DataError, match=r"no shard train-002\.tar"):
        resolve_dataset(str(folder / "train-{000..007}.tar"))


def test_ugly_names_and_labels(tmp_path: Path) -> None:
    names = ["a b/ü'\"\n.png", "../../etc/passwd.png", "\udcff\udcfe.png", "z" * 300 + ".png", "-rf *.png"]
    members: dict[str, bytes | str] = {}
    for number, name in enumerate(names):
        label = '{"label": "\\ud800 <b>"}' if number == 0 else json.dumps({"label": f"c,\n{number % 2}"})
        members |= {name: encode_image(number), name.replace(".png", ".json"): label}
    folder = tmp_path / "it's ünïcode #%20 [1] {0..1}*.tar"
    write_tar(folder / "x y.tar", members)
    before = resolve_dataset(str(folder)).splits["train"]
    build_index(str(folder))
    after = train_source(folder)
    assert contents(after) == contents(before)
    assert after.labels == before.labels
    assert len(after) == len(names)


def test_classes_of_one_split_do_not_enter_another(tmp_path: Path) -> None:
    """As without an index: the classes of a split are those of its images, and integers are sorted by value."""
    for name, labels in {"train-0": ["10", "2", "2", "1"], "val-0": ["2", "10"], "test-0": ["1", "cat"]}.items():
        pairs = {f"{i}.png": encode_image(i) for i in range(len(labels))}
        write_tar(tmp_path / f"{name}.tar", pairs | {f"{i}.cls": label for i, label in enumerate(labels)})
    build_index(str(tmp_path))
    splits = resolve_dataset(str(tmp_path)).splits
    assert splits["train"].labels == ("1", "2", "10")
    assert splits["train"].targets.tolist() == [2, 1, 1, 0]
    assert splits["val"].labels == ("2", "10")
    with pytest.raises(DataError, match="classes that the training set lacks: 'cat'"):
        open_data(DataConfig(source=str(tmp_path)), 0)


def test_multi_label(tmp_path: Path) -> None:
    labels = [["b", "a"], [], ["c"]]
    members: dict[str, bytes | str] = {f"{i}.png": encode_image(i) for i in range(3)}
    write_tar(tmp_path / "x.tar", members | {f"{i}.json": json.dumps({"label": each}) for i, each in enumerate(labels)})
    build_index(str(tmp_path))
    source = train_source(tmp_path, multi_label=True)
    assert source.labels == ("a", "b", "c")
    assert source.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    with pytest.raises(DataError, match=r"data\.multi_label"):
        resolve_dataset(str(tmp_path))


def test_damaged_shards_are_reported_and_used_up_to_the_damage(folder: Path) -> None:
    path = folder / "train-000.tar"
    path.write_bytes(path.read_bytes()[:9000])
    write_tar(folder / "train-001.tar", samples(0, 2) | {"lonely.png": encode_image(1)})
    with tarfile.open(folder / "train-009.tar", "w:gz"):
        pass
    before = resolve_dataset(str(folder))
    report = build_index(str(folder))
    after = resolve_dataset(str(folder))
    assert sorted(contents(after.splits["train"])) == sorted(contents(before.splits["train"]))
    assert [note.code for note in report.notes] == ["shard_damaged", "samples_left_out", "shard_damaged"]
    assert {note.code for note in after.notes} == {note.code for note in before.notes}
    assert after.notes == report.notes
    assert "compressed" in report.notes[2]


def test_shards_that_are_sorted_by_class_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        members = samples(0, 20, classes=1)
        members |= {name: f"class {number}" for name in members if name.endswith(".cls")}
        write_tar(tmp_path / f"{number}.tar", members)
    assert run_in_process(capsys, "index", tmp_path).returncode == 0
    assert [note.code for note in resolve_dataset(str(tmp_path)).notes] == ["shards_not_shuffled"]
    write_tar(tmp_path / "3.tar", samples(0, 20))
    write_tar(tmp_path / "4.tar", samples(20, 40))
    write_tar(tmp_path / "5.tar", samples(20, 40))
    assert not build_index(str(tmp_path), overwrite=True).notes


# ---- an index is never stale


def test_running_again(folder: Path) -> None:
    build_index(str(folder))
    before = (folder / INDEX_FILE).stat()
    assert not build_index(str(folder)).written
    assert (folder / INDEX_FILE).stat() == before
    write_tar(folder / "train-003.tar", samples(100, 104))
    with pytest.raises(OutputError, match=r"1 new.*train-003\.tar.*--overwrite") as error:
        build_index(str(folder))
    assert error.value.code == "output_exists"
    opened = resolve_dataset(str(folder))
    assert [note.code for note in opened.notes] == ["shards_not_indexed"]
    assert len(opened.splits["train"]) == 20
    assert build_index(str(folder), overwrite=True).num_samples == 29
    assert len(train_source(folder)) == 24


@pytest.mark.parametrize("change", ["content", "size", "gone"])
def test_changed_shards_are_noticed_when_a_run_starts(folder: Path, change: str) -> None:
    build_index(str(folder))
    path = folder / "train-001.tar"
    if change == "gone":
        path.unlink()
    else:  # of the same size, or not
        write_tar(path, samples(50, 54 if change == "content" else 70))
        os.utime(path, ns=(0, 0))
    with pytest.raises(
        StorageError, match=rf"train-001\.tar.* changed .*patchword index {folder} --overwrite"
    ) as error:
        resolve_dataset(str(folder))
    assert error.value.code == "object_changed"


def test_a_shard_that_changes_later_stops_the_run(folder: Path) -> None:
    """It must not be an unreadable image, which would be replaced by another in silence."""
    build_index(str(folder))
    source = train_source(folder)
    shutil.copy(folder / "val-000.tar", folder / source.key(0).partition(":")[0])
    with pytest.raises(StorageError) as error:
        source.read(0, mode="RGB")
    assert error.value.code == "object_changed"


def test_damaged_image_is_an_unreadable_image(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", samples(0, 3) | {"00001.png": b"damaged"})
    build_index(str(tmp_path))
    with pytest.raises(ImageError, match=r"x\.tar:00001\.png"):
        train_source(tmp_path).read(1, mode="RGB")


@pytest.mark.parametrize("keep", [20, 500, -100, -8])
def test_damaged_index(folder: Path, keep: int) -> None:
    build_index(str(folder))
    path = folder / INDEX_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="is damaged .*--overwrite"):
        resolve_dataset(str(folder))
    with pytest.raises(DataError, match="is damaged .*--overwrite"):
        build_index(str(folder))
    build_index(str(folder), overwrite=True)
    assert len(train_source(folder)) == 20


def test_arrow_file_of_another_program_is_not_an_index(folder: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.OSFile(str(folder / INDEX_FILE), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert isinstance(resolve_dataset(str(folder)).splits["train"], ShardSource)
    with pytest.raises(DataError, match="is not an index of patchword"):
        build_index(str(folder))


# ---- splits and fingerprints


def test_fingerprint_depends_on_content_alone(folder: Path, tmp_path: Path) -> None:
    build_index(str(folder))
    first = fingerprint(train_source(folder))
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    for path in moved.glob("**/*.tar"):
        os.utime(path, ns=(1, 1))
    write_tar(moved / "test-000.tar", samples(100, 104))  # of another split
    build_index(str(moved), overwrite=True)
    assert fingerprint(train_source(moved)) == first
    val = resolve_dataset(str(folder)).splits["val"].subset(np.arange(3))
    (moved / "train-001.tar").unlink()  # also for a subset, whose rows are numbered otherwise then
    build_index(str(moved), overwrite=True)
    assert fingerprint(resolve_dataset(str(moved)).splits["val"].subset(np.arange(3))) == fingerprint(val)
    shutil.copy(folder / "train-001.tar", moved / "train-001.tar")
    build_index(str(moved), overwrite=True)
    source = train_source(moved)
    digests = {
        fingerprint(each)
        for each in (
            source,
            source.subset(np.arange(19)),
            source.subset(np.arange(20)[::-1]),
            source.subset(np.arange(1, 20)),
            source.subset(np.zeros(20, np.int64)),
            source.subset(np.array([0, 1, 2])),
            source.subset(np.array([3, 4, 5])),  # with the same targets
        )
    }
    assert len(digests) == 7
    write_tar(moved / "train-001.tar", samples(9, 13) | {"00010.cls": "class 0"})
    build_index(str(moved), overwrite=True)
    assert fingerprint(train_source(moved)) not in digests


def test_saved_split_is_compact_and_is_applied_again(folder: Path) -> None:
    build_index(str(folder))
    config = DataConfig(source=str(folder / "train-*.tar"), val_fraction=0.3)
    first = open_data(config, seed=5)
    saved = json.loads(json.dumps(first.split_info))
    assert "val" not in saved
    again = open_data(config, seed=99, saved=saved)
    assert first.val is not None
    assert again.val is not None
    assert contents(again.train) == contents(first.train)
    assert contents(again.val) == contents(first.val)
    assert len(first.val) == 4
    unindexed = {**saved, "val": [first.train.key(0)]}  # as a run of an earlier version saved it
    del unindexed["val_mask"]
    assert len(open_data(config, seed=0, saved=unindexed).train) == 12
    for damaged in ("", "AAAA", 3, saved["val_mask"][:-8]):
        with pytest.raises(DataError, match="val_mask"):
            open_data(config, seed=0, saved={**saved, "val_mask": damaged})


def test_run_that_started_without_the_index(folder: Path) -> None:
    config = DataConfig(source=str(folder))
    saved = open_data(config, 0).split_info
    build_index(str(folder))
    with pytest.raises(DataError, match=r"If the run started before index\.arrow was written, move that file away"):
        open_data(config, 0, saved)
    (folder / INDEX_FILE).rename(folder / "elsewhere")
    open_data(config, 0, saved)


def test_validation_data_that_are_also_training_data(folder: Path) -> None:
    val = write_shards(folder.parent / "other", {"x": 3})
    build_index(str(folder))
    config = DataConfig(source=str(folder / "train-*.tar"), val=str(folder / "train-001.tar"))
    with pytest.raises(DataError, match="4 of its 4 images are also in the training set"):
        open_data(config, 0)
    for reference in (folder / "val-*.tar", val):
        assert open_data(config.replace(val=str(reference)), 0).val is not None


# ---- the sampler


def test_sampler_is_chosen_by_the_data(folder: Path) -> None:
    plain = resolve_dataset(str(folder)).splits["train"]
    balanced = Config(data=DataConfig(balanced_sampling=True))
    assert type(make_sampler(plain, Config())) is ShuffledSampler
    assert type(make_sampler(plain, balanced)) is BalancedSampler
    build_index(str(folder))
    source = train_source(folder)
    sampler = make_sampler(source, Config(batch_size=8, data=DataConfig(lanes=3)))
    assert isinstance(sampler, LaneSampler)
    assert (sampler.num_lanes, sampler.num_samples) == (2, 20)
    with pytest.raises(ConfigError, match=r"data\.balanced_sampling true .*class_weights") as error:
        make_sampler(source, balanced)
    assert error.value.field == "data.balanced_sampling"
    reordered = source.subset(np.array([19, 3, 0, 12, 13, 1]))
    indices, _ = make_sampler(reordered, Config(batch_size=6, data=DataConfig(lanes=1, shuffle_window=1)))(0, 6)
    shards = [source.key(int(reordered.rows[i])).partition(":")[0] for i in indices]
    assert sorted(indices) == list(range(6))
    assert shards == sorted(shards, key=shards.index)  # each shard in one piece


# ---- size


def test_opening_a_million_rows_makes_no_python_objects(tmp_path: Path) -> None:
    """Names alone would take about 70 MB; the arrays of positions take 8 MB each, and targets stay in the file."""
    script = """
import sys
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import scale_index
result = scale_index.measure(1_000_000)
assert result["train_images"] == 950_000, result
assert result["open_shared_mb"] + result["open_private_mb"] < 50, result
assert result["train_shared_mb"] + result["train_private_mb"] < 60, result
"""
    subprocess.run([sys.executable, "-c", script, str(ROOT)], check=True, timeout=600)


# ---- the command


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_in_process(capsys, "index", folder, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["splits"] == {"train": 20, "val": 5}
    assert "4 shards, 25 images, 3 classes" in done.stderr
    assert run_in_process(capsys, "index", folder).stderr.startswith("up to date: ")
    path = folder / "train-000.tar"
    path.write_bytes(path.read_bytes()[:9000])
    stale = run_in_process(capsys, "index", folder)
    assert (stale.returncode, stale.stdout) == (2, "")
    assert "1 changed" in stale.stderr
    damaged = run_in_process(capsys, "index", folder, "--overwrite", "--json")
    assert damaged.returncode == 3
    assert json.loads(damaged.stdout)["notes"][0]["code"] == "shard_damaged"


@pytest.mark.parametrize(
    ("members", "message"),
    [({}, "no labeled images"), ({"1.png": encode_image(0)}, "no labeled images"), (None, "no .tar shards")],
)
def test_nothing_to_index(
    members: dict[str, bytes | str] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if members is not None:
        write_tar(tmp_path / "x.tar", members)
    done = run_in_process(capsys, "index", tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / INDEX_FILE).exists()
    assert run_in_process(capsys, "index", tmp_path / "missing").returncode == 2
    for name in ("x.tar", "x-{0..3}.tar", "x*"):
        done = run_in_process(capsys, "index", tmp_path / name)
        assert done.returncode == 2
        assert done.stderr.endswith(f"patchword index {tmp_path}\n")


def test_without_pyarrow(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build_index(str(folder))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for arguments in (["index", folder], ["train", "quickstart", "--data.source", folder]):
        done = run_in_process(capsys, *arguments)
        assert done.returncode == 2
        assert "needs the package pyarrow: " in done.stderr
        assert "[remote]" in done.stderr


def test_replacing_an_index_does_not_disturb_a_run_that_has_it_open(folder: Path) -> None:
    build_index(str(folder))
    index = ShardIndex(folder / INDEX_FILE)
    write_tar(folder / "train-003.tar", samples(100, 104))
    build_index(str(folder), overwrite=True)
    assert [index.key(row) for row in range(3)] == ["00018.png", "00019.png", "00020.png"]
    assert (len(index), index.offsets[0]) == (25, 512)
