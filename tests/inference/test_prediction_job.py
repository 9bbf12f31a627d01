"""Large jobs on this machine: inputs, parts, resuming, and what happens when processes die or files change."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.command import run, run_in_process
from helpers.prediction_jobs import (
    CHUNK_SIZE,
    MODEL,
    POISON,
    SITE_CUSTOMIZE,
    load_model,
    make_photos,
    make_request,
    photo,
    read_parts,
    read_paths,
    read_rows,
    run_here,
    run_job,
    write_tar,
)
from patchword.data.storage import open_storage
from patchword.errors import ConfigError, DataError, PatchwordError, StorageError
from patchword.inference import chunk_process, prediction_job, prediction_manifest
from patchword.inference.chunk_process import ChunkProcess
from patchword.inference.classifier import Classifier
from patchword.inference.input_listing import InputListing
from patchword.inference.prediction_job import check_machine, finish_job, open_job, require_same_job, run_locally
from patchword.inference.prediction_manifest import Manifest
from patchword.inference.prediction_parts import ChunkModel, part_key, predict_chunk

NUM_PHOTOS = 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", NUM_PHOTOS)
    return tmp_path / "photos"


def code_of(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(PatchwordError) as error:
        call(*arguments, **options)
    return error.value.code


# ---- the output


def test_rows_are_the_predictions_in_the_order_of_the_manifest(photos: Path, tmp_path: Path) -> None:
    summary = run_job(photos, tmp_path / "out")
    assert (summary["images"], summary["parts"], summary["errors"]) == (NUM_PHOTOS + 1, 4, 1)
    assert summary["error_codes"] == {"image_unsupported": 1}
    assert json.loads((tmp_path / "out/_SUCCESS.json").read_text()) == summary
    rows = read_rows(tmp_path / "out")
    assert [row["path"] for row in rows] == sorted(str(path) for path in photos.rglob("*.png"))
    classifier = Classifier.load(MODEL)
    for row in rows:
        if row["error"]:
            assert row["path"].endswith("junk.png") and row["code"] == "image_unsupported" and row["label_1"] is None
            continue
        scores = classifier(row["path"], top=2).scores
        assert [row["label_1"], row["label_2"]] == [score.label for score in scores]
        assert [row["index_1"], row["index_2"]] == [score.index for score in scores]
        assert row["probability_1"] == pytest.approx(scores[0].probability, abs=1e-5)


def test_features(photos: Path, tmp_path: Path) -> None:
    run_job(photos, tmp_path / "out", task="embed")
    rows = read_rows(tmp_path / "out")
    model = load_model().build_model()
    classifier = Classifier(load_model())
    assert len(rows) == NUM_PHOTOS + 1
    for row in rows:
        if row["error"]:
            assert row["features"] is None
            continue
        pixels = classifier.preprocess.normalize(classifier.pixels(row["path"])[None])
        with torch.inference_mode():
            np.testing.assert_allclose(row["features"], model.embed_images(pixels)[0], atol=1e-4)
    part = pq.read_schema(io.BytesIO(read_parts(tmp_path / "out")[part_key(0)]))
    assert part.field("features").type == pa.list_(pa.float32(), len(rows[0]["features"]))


def test_parts_are_reproducible_and_final(photos: Path, tmp_path: Path) -> None:
    run_job(photos, tmp_path / "a")
    run_job(photos, tmp_path / "b")
    before = read_parts(tmp_path / "a")
    assert before == read_parts(tmp_path / "b")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    (photos / "0/9999.png").write_bytes(photo(9999))  # the manifest decides, not the folder
    assert run_job(photos, tmp_path / "a")["images"] == NUM_PHOTOS + 1
    job = open_job(make_request(photos, tmp_path / "a"))
    assert not job.pending()
    for number in range(4):  # a zombie that did not notice
        model = ChunkModel.open(load_model(), job.manifest.settings)
        assert not predict_chunk(model, job.manifest, number).created
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}


def test_resume_computes_what_is_missing(photos: Path, tmp_path: Path) -> None:
    run_job(photos, tmp_path / "whole")
    job = open_job(make_request(photos, tmp_path / "out"))
    model = ChunkModel.open(load_model(), job.manifest.settings)
    predict_chunk(model, job.manifest, 2)
    with pytest.raises(StorageError, match="same command again") as missing:
        finish_job(job)
    assert missing.value.code == "parts_missing"
    again = open_job(make_request(photos, tmp_path / "out", chunk_size=None))
    assert sorted(again.pending()) == [0, 1, 3]
    assert again.num_done == CHUNK_SIZE
    run_here(again)
    finish_job(again)
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "whole")


def test_another_job_is_refused(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_job(photos, out)
    wrong: list[dict[str, Any]] = [
        {"task": "embed"},
        {"top": 3},
        {"chunk_size": 4},
        {"inputs": photos / "0"},
        {"checkpoint": load_model().with_metadata(labels=list("abcdefghij"))},
        {"checkpoint": load_model().adapt(image_size=(48, 48))},
    ]
    for change in wrong:
        with pytest.raises(ConfigError, match="belongs to a job with another|belongs to a job with other") as error:
            open_job(make_request(**{"inputs": photos, "out": out} | change))
        assert error.value.code == "output_differs"
    job = open_job(make_request(photos, out))
    assert not job.pending()
    assert code_of(require_same_job, job.request, job.manifest, job.manifest.settings | {"engine": "onnx"})


def test_another_machine(photos: Path, tmp_path: Path) -> None:
    """Exact engines continue with a note; int8 predictions depend on the CPU, so they do not."""
    manifest = open_job(make_request(photos, tmp_path / "out")).manifest
    assert check_machine(manifest) == []
    other = replace(manifest, machine=manifest.machine | {"isa": ["sve"], "cpu": "another"})
    assert [note.code for note in check_machine(other)] == ["machine_differs"]
    int8 = replace(other, settings=other.settings | {"engine": "onnx-int8"})
    assert code_of(check_machine, int8) == "machine_differs"
    assert check_machine(replace(int8, machine=manifest.machine)) == []


def test_an_output_that_cannot_be_written(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    refused = run_in_process(capsys, "predict", MODEL, photos, "--out", tmp_path / "file/out")
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr


def test_a_damaged_manifest_is_one_sentence(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = open_job(make_request(photos, out))
    (out / job.manifest.files[0]).write_bytes(b"PAR1 junk")
    with pytest.raises(StorageError, match="rows-.* is damaged"):
        run_here(job)
    content = json.loads((out / "manifest/manifest.json").read_text())
    changes: list[dict[str, Any]] = [{"machine": 1}, {"settings": None}, {"chunk_size": 0}, {"roots": [1]}]
    for text in [
        *(json.dumps(content | change) for change in changes),
        *(json.dumps({key: content[key] for key in content if key != name}) for name in content),
        "[]",
        "{",
    ]:
        (out / "manifest/manifest.json").write_text(text)
        with pytest.raises(StorageError, match="is damaged, or not a manifest"):
            open_job(make_request(photos, out))


def test_a_complete_job_is_not_prepared_again(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building an engine takes minutes, and a machine that only looks at a complete output may not have it."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    summary = run_job(photos, tmp_path / "out", engine="onnx")
    monkeypatch.setattr(prediction_job, "Classifier", None)  # building one would be an error
    for engine in ("onnx", "auto"):
        job = open_job(make_request(photos, tmp_path / "out", engine=engine))
        assert not job.pending()
        assert finish_job(job) == summary
    assert code_of(open_job, make_request(photos, tmp_path / "out")) == "output_differs"


def test_wrong_requests(photos: Path, tmp_path: Path) -> None:
    assert code_of(open_job, make_request(tmp_path / "missing", tmp_path / "o")) == "invalid_data"
    assert code_of(open_job, make_request("cifar10", tmp_path / "o")) == "invalid_data"
    assert code_of(open_job, make_request(photos, tmp_path / "o", chunk_size=0)) == "invalid_config"
    (tmp_path / "empty").mkdir()
    assert code_of(open_job, make_request(tmp_path / "empty", tmp_path / "o")) == "no_image"
    (tmp_path / "strange/manifest").mkdir(parents=True)
    (tmp_path / "strange/manifest/manifest.json").write_text("{}")
    assert code_of(open_job, make_request(photos, tmp_path / "strange")) == "storage_failed"


# ---- inputs


def test_inputs_of_every_kind(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same images from a folder, a pattern, single files, tars, Parquet and CSV have the same predictions."""
    monkeypatch.chdir(tmp_path)
    contents = {f"{i}.png": photo(i) for i in range(10)}
    Path("plain").mkdir()
    for name, content in contents.items():
        Path("plain", name).write_bytes(content)
    Path("shards").mkdir()
    first, second = dict(list(contents.items())[:6]), dict(list(contents.items())[6:])
    write_tar(Path("shards/0.tar"), {"a.txt": b"x", **first, ".hidden.png": b"x"})
    write_tar(Path("shards/1.tar"), second)
    cells = [{"bytes": content, "path": None} for content in contents.values()]
    pq.write_table(pa.table({"image": cells, "other": list(range(10))}), "rows.parquet", row_group_size=3)
    with open("list.csv", "w") as file:
        csv.writer(file).writerows([["path"], *([f"plain/{name}"] for name in contents)])
    inputs: dict[str, tuple[tuple[str, ...], list[str]]] = {
        "folder": (("plain",), [f"plain/{name}" for name in contents]),
        "pattern": (("plain/*.png",), [f"plain/{name}" for name in contents]),
        "files": (tuple(f"plain/{name}" for name in contents), [f"plain/{name}" for name in contents]),
        "tars": (("shards",), [f"shards/{'0' if name in first else '1'}.tar:{name}" for name in contents]),
        "rows": (("rows.parquet",), [f"rows.parquet row {i}" for i in range(10)]),
        "list": (("list.csv",), [f"plain/{name}" for name in contents]),
    }
    scores = {}
    for kind, (references, paths) in inputs.items():
        assert run_job(references, f"out/{kind}")["errors"] == 0
        rows = read_rows(f"out/{kind}")
        assert [row.pop("path") for row in rows] == paths, kind
        scores[kind] = rows
    assert all(rows == scores["folder"] for rows in scores.values())


def test_damaged_inputs_are_rows_with_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {f"{i}.png": photo(i) for i in range(3)})
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[:6000])
    pq.write_table(pa.table({"image": [photo(0), None, b"junk"]}), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("path\nmissing.png\n")
    inputs = tuple(tmp_path / name for name in ("a.tar", "b.parquet", "c.csv", "gone.png"))
    summary = run_job(inputs, tmp_path / "out")
    rows = [(row["path"].removeprefix(f"{tmp_path}/"), row["code"]) for row in read_rows(tmp_path / "out")]
    assert rows == [
        ("a.tar:0.png", None),
        ("a.tar", "image_damaged"),
        ("b.parquet row 0", None),
        ("b.parquet row 1", "image_empty"),
        ("b.parquet row 2", "image_unsupported"),
        ("missing.png", "object_not_found"),
        ("gone.png", "object_not_found"),
    ]
    assert summary["errors"] == 5
    (tmp_path / "d.parquet").write_bytes(b"junk")
    assert code_of(run_job, tmp_path / "d.parquet", tmp_path / "other") == "invalid_data"


def test_listing_rules(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards beside images are left out and named; the output is never an input; other names survive."""
    monkeypatch.chdir(photos)
    write_tar(photos / "more.tar", {"x.png": photo(1)})
    (photos / ".hidden.png").write_bytes(photo(2))
    (photos / os.fsdecode(b"\xff.png")).write_bytes(photo(3))
    listing = InputListing(["."])
    entries = list(listing)
    assert len(entries) == NUM_PHOTOS + 2
    assert [note.code for note in listing.notes] == ["files_left_out"]
    assert run_job(photos, photos / "out")["images"] == NUM_PHOTOS + 2
    (photos / "out/image.png").write_bytes(photo(4))
    assert len(list(InputListing([str(photos)], exclude=str(photos / "out")))) == NUM_PHOTOS + 2
    assert read_paths(photos / "out")[-1] == f"{photos}/\\udcff.png"
    assert sum(row["error"] is not None for row in read_rows(photos / "out")) == 1


def test_an_image_that_changes_is_never_predicted(photos: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {f"{i}.png": photo(i) for i in range(3)})
    pq.write_table(pa.table({"image": [photo(0)]}), tmp_path / "b.parquet")
    inputs = (photos / "0/0000.png", photos / "0/0003.png", tmp_path / "a.tar", tmp_path / "b.parquet")
    job = open_job(make_request(inputs, tmp_path / "out"))
    (photos / "0/0000.png").write_bytes(photo(77))
    (photos / "0/0003.png").unlink()
    write_tar(tmp_path / "a.tar", {f"{i}.png": photo(i + 50) for i in range(3)})
    pq.write_table(pa.table({"image": [photo(9)]}), tmp_path / "b.parquet")
    run_here(job)
    codes = [row["code"] for row in read_rows(tmp_path / "out")]
    assert codes == ["object_changed", "object_not_found", *["object_changed"] * 4]
    assert all(row["label_1"] is None for row in read_rows(tmp_path / "out"))
    assert finish_job(job)["errors"] == 6


def test_a_manifest_in_several_files(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows of one chunk are read at a time; files are named by content, so drivers cannot disagree."""
    monkeypatch.setattr(prediction_manifest, "CHUNKS_PER_FILE", 2)
    job = open_job(make_request(photos, tmp_path / "out", chunk_size=4))
    assert len(job.manifest.files) == 4
    listed = list(InputListing([str(photos)]))
    assert [entry for n in range(job.manifest.num_chunks) for entry in job.manifest.entries(n)] == listed
    assert [job.manifest.chunk_length(n) for n in (0, 7)] == [4, 3]
    again = open_job(make_request(photos, tmp_path / "other", chunk_size=4))
    assert again.manifest.files == job.manifest.files
    assert again.manifest.digest == job.manifest.digest


def test_the_manifest_that_is_first_is_used(photos: Path, tmp_path: Path) -> None:
    """Two drivers start at the same moment with a folder that is changing: both use the same list."""
    storage = open_storage(tmp_path / "out")
    settings = {"task": "predict"}
    first = prediction_manifest.write_manifest(storage, InputListing([str(photos)]), settings, {}, 8)
    (photos / "0/9999.png").write_bytes(photo(9999))
    second = prediction_manifest.write_manifest(storage, InputListing([str(photos)]), settings, {}, 8)
    assert second == first
    assert Manifest.read(storage) == first


# ---- processes


def test_two_drivers_share_one_output(photos: Path, tmp_path: Path) -> None:
    run_job(photos, tmp_path / "alone", chunk_size=2)
    jobs = [open_job(make_request(photos, tmp_path / "out", chunk_size=2)) for _ in range(2)]
    threads = [threading.Thread(target=run_here, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finish_job(jobs[0]) == finish_job(jobs[1])
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "alone")
    created = sorted(result.number for job in jobs for result in job.results if result.created)
    assert created == list(range(16))


@pytest.mark.slow
def test_a_poisonous_image_gets_an_error_row(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line, in real child processes that are really killed."""
    (photos / "1/0004.png").write_bytes(POISON)
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    flags = ("--out", tmp_path / "out", "--chunk-size", 16, "--json")
    monkeypatch.setattr(chunk_process, "MAX_DEATHS", 1)  # each start of a process takes seconds
    done = run_in_process(capsys, "predict", MODEL, photos, *flags)
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert summary["error_codes"] == {"image_crashes": 1, "image_unsupported": 1}
    rows = {row["path"]: row for row in read_rows(tmp_path / "out")}
    assert len(rows) == NUM_PHOTOS + 1
    assert rows[str(photos / "1/0004.png")]["code"] == "image_crashes"
    assert sum(row["label_1"] is not None for row in rows.values()) == NUM_PHOTOS - 1


@pytest.mark.slow
def test_errors_of_the_child_keep_their_class(photos: Path, tmp_path: Path) -> None:
    job = open_job(make_request(photos, tmp_path / "out"))
    path = tmp_path / "out/manifest/manifest.json"
    path.write_text(path.read_text().replace('"engine": "torch"', '"engine": "steam"'))
    assert "steam" in path.read_text()
    with ChunkProcess(str(tmp_path / "out"), load_model(), 1) as process, pytest.raises(ConfigError, match="steam"):
        process.compute_safely(job.pending()[0])


@pytest.mark.slow
def test_a_killed_child_is_replaced(photos: Path, tmp_path: Path) -> None:
    run_job(photos, tmp_path / "alone")
    job = open_job(make_request(photos, tmp_path / "out"))
    counts: list[int] = []

    def kill_first(count: int) -> None:
        counts.append(count)
        if len(counts) == 1:
            os.kill(process._process.pid, signal.SIGKILL)

    with ChunkProcess(str(tmp_path / "out"), load_model(), 1, kill_first) as process:
        for number in job.pending():
            job.results.append(process.compute_safely(number))
    assert finish_job(job)["images"] == NUM_PHOTOS + 1
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "alone")


@pytest.mark.slow
def test_a_killed_and_a_stopped_command_continue(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 200)
    run_job(tmp_path / "photos", tmp_path / "alone", chunk_size=4)
    flags = ["--out", str(tmp_path / "out"), "--top", "2", "--chunk-size", "4"]
    command = [sys.executable, "-m", "patchword", "predict", MODEL, str(tmp_path / "photos"), *flags]
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = len(list((tmp_path / "out").glob("part-*")))
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            end = time.monotonic() + 120
            while len(list((tmp_path / "out").glob("part-*"))) == before and time.monotonic() < end:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            stderr = process.communicate(timeout=120)[1]
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), stderr
        assert "Traceback" not in stderr
    assert "type the same command again" in stderr
    done = run(*command[3:], "--json")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["images"] == 201
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "alone")


@pytest.mark.slow
def test_the_local_runner_reports_its_progress(photos: Path, tmp_path: Path) -> None:
    run_job(photos, tmp_path / "alone")
    job = open_job(make_request(photos, tmp_path / "out"))
    counts: list[int] = []
    run_locally(job, counts.append)
    assert sum(counts) == NUM_PHOTOS + 1
    assert finish_job(job)["errors"] == 1
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "alone")


def test_options_that_exclude_each_other(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    wrong: list[tuple[object, ...]] = [
        ("predict", MODEL, photos, "--ray", "local"),
        ("predict", MODEL, photos, "--chunk-size", 8),
        ("predict", MODEL, photos, "--out", out, "--csv", tmp_path / "a.csv"),
        ("predict", MODEL, photos, "--out", out, "--overwrite"),
        ("predict", MODEL, photos, "--out", out, "--explain", tmp_path / "e"),
        ("embed", MODEL, photos, "--out", tmp_path / "a.npz", "--ray", "local"),
        ("embed", MODEL, photos, "--out", f"{out}/", "--overwrite"),
        ("embed", MODEL, photos, "--out", tmp_path / "a.txt"),
    ]
    for words in wrong:
        refused = run_in_process(capsys, *words)
        assert refused.returncode == 2, words
        assert "--" in refused.stderr or "features.npz" in refused.stderr
        assert not out.exists()


def test_pyarrow_missing_is_one_sentence(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="needs the package pyarrow: .*install"):
        open_job(make_request(photos, tmp_path / "out"))


def test_predictions_of_a_named_dataset_are_for_the_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--csv"):
        open_job(make_request("digits", tmp_path / "out"))


def test_small_jobs_take_shards_without_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards/0.tar", {f"{i}.png": photo(i) for i in range(3)})
    pq.write_table(pa.table({"image": [photo(0), photo(1)]}), tmp_path / "b.parquet")
    inputs = (tmp_path / "shards", tmp_path / "shards/0.tar", tmp_path / "b.parquet")
    done = run_in_process(capsys, "predict", MODEL, *inputs, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["path"].removeprefix(f"{tmp_path}/") for row in rows] == [
        *[f"shards/0.tar:{i}.png" for i in range(3)] * 2,
        *[f"b.parquet row {i}" for i in range(2)],
    ]
    assert rows[0]["predictions"] == rows[3]["predictions"] == rows[6]["predictions"]


def test_directory_with_files_of_the_user_is_refused(photos: Path, tmp_path: Path) -> None:
    """Such as the images themselves. What a killed listing left, and hidden files, are not in the way."""
    before = sorted(photos.rglob("*"))
    with pytest.raises(ConfigError, match=r"0/0000\.png") as error:
        open_job(make_request(photos, photos))
    assert error.value.code == "output_not_empty"
    assert sorted(photos.rglob("*")) == before
    (tmp_path / "out/manifest").mkdir(parents=True)
    (tmp_path / "out/manifest/rows-1.parquet").touch()
    (tmp_path / "out/.hidden").touch()
    assert open_job(make_request(photos, tmp_path / "out")).pending()
