"""Large jobs in an object store that fails: the same output, or one sentence."""

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.command import run, run_in_process
from helpers.object_server import BUCKET, FaultProxy, ObjectServer, environment, faulty, serve_objects
from helpers.prediction_jobs import (
    CHUNK_SIZE,
    MODEL,
    make_request,
    photo,
    read_parts,
    read_rows,
    run_here,
    run_job,
    write_tar,
)
from patchword.errors import StorageError
from patchword.inference.prediction_job import finish_job, open_job

RATES = {name: 0.05 / 7 * 3 for name in ("500", "503", "reset", "lost", "truncate", "conflict")} | {"stall": 0.005}
PHOTOS = {f"{number % 3}/{number:03}.png": photo(number) for number in range(30)} | {"1/junk.png": b"junk"}


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with serve_objects() as server:
        for key, content in PHOTOS.items():
            server.put(f"photos/{key}", content)
        yield server


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def connect(monkeypatch: pytest.MonkeyPatch, endpoint: str, timeout: float = 60) -> None:
    for name, value in environment(endpoint, timeout).items():
        monkeypatch.setenv(name, value)


def test_inputs_of_every_kind(
    server: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, server.endpoint)
    images = {f"{i}.png": photo(i) for i in range(10)}
    write_tar(tmp_path / "a.tar", images)
    cells = [{"bytes": content, "path": None} for content in images.values()]
    pq.write_table(pa.table({"image": cells}), tmp_path / "b.parquet", row_group_size=4)
    key = tmp_path.name
    for name in ("a.tar", "b.parquet"):
        server.put(f"{key}/shards/{name}", (tmp_path / name).read_bytes())
    lines = ["path", *(f"images/{name}" for name in list(images)[:5])]
    lines += [f"{prefix}/images/{name}" for name in list(images)[5:]]
    server.put(f"{key}/list.csv", "\n".join(lines).encode())
    for name, content in images.items():
        server.put(f"{key}/images/{name}", content)
    scores = []
    for kind, inputs in {
        "images": (f"{prefix}/images/",),
        "files": tuple(f"{prefix}/images/{name}" for name in images),
        "tar": (f"{prefix}/shards/a.tar",),
        "parquet": (f"{prefix}/shards/b.parquet",),
        "list": (f"{prefix}/list.csv",),
        "shards": (f"{prefix}/shards",),
    }.items():
        summary = run_job(inputs, f"{prefix}/out/{kind}")
        assert (summary["errors"], summary["images"]) == (0, 20 if kind == "shards" else 10)
        rows = read_rows(f"{prefix}/out/{kind}")
        names = [row.pop("path") for row in rows]
        assert all(name.startswith(prefix) for name in names)
        scores.append(rows[:10])
    assert all(rows == scores[0] for rows in scores)
    with pytest.raises(StorageError, match="no-such-bucket"):
        run_job("s3://no-such-bucket/photos", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_output_survives_faults(server: ObjectServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drivers at once behind a network that fails."""
    connect(monkeypatch, server.endpoint)
    photos = f"s3://{BUCKET}/photos"
    summary = run_job(photos, f"{prefix}/quiet", chunk_size=4)
    with faulty(server, RATES, seed=1) as proxy:
        connect(monkeypatch, proxy.endpoint, timeout=9)  # a stall ends after 1.5 s
        for attempt in range(3):  # each draws other faults
            out = f"{prefix}/faulty{attempt}"
            jobs = [open_job(make_request(photos, out, chunk_size=4)) for _ in range(2)]
            threads = [threading.Thread(target=run_here, args=(job,)) for job in jobs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = finish_job(jobs[0])
            assert found | {"manifest": ""} == summary | {"manifest": ""}
            created = sorted(result.number for job in jobs for result in job.results if result.created)
            assert len(set(created)) == len(created)  # a lost response may hide that a part was created
            assert read_parts(out) == read_parts(f"{prefix}/quiet")
        assert sum(proxy.faults().values()) > 20


def test_an_object_that_changes_is_never_predicted(
    server: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, server.endpoint)
    content = io.BytesIO()
    pq.write_table(pa.table({"image": [photo(0), photo(1)]}), content)
    write_tar(tmp_path / "a.tar", {"1.png": photo(1)})
    before = {"a.tar": (tmp_path / "a.tar").read_bytes(), "b.parquet": content.getvalue(), "c.png": photo(0)}
    for name, data in before.items():
        server.put(f"{tmp_path.name}/in/{name}", data)
    job = open_job(make_request(tuple(f"{prefix}/in/{name}" for name in before), f"{prefix}/out"))
    for name, data in before.items():
        server.put(f"{tmp_path.name}/in/{name}", data + b" ")
    run_here(job)
    assert [row["code"] for row in read_rows(f"{prefix}/out")] == ["object_changed"] * 4
    assert finish_job(job)["error_codes"] == {"object_changed": 4}


def test_neighbors_in_a_tar_are_one_request(
    server: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "a.tar", {f"{i:03}.png": photo(i) for i in range(40)})
    server.put(f"{tmp_path.name}/a.tar", (tmp_path / "a.tar").read_bytes())
    with faulty(server) as proxy:
        connect(monkeypatch, proxy.endpoint)
        job = open_job(make_request(f"{prefix}/a.tar", tmp_path / "out", chunk_size=40))
        assert len(proxy.log) < 10  # the headers of small members come in blocks
        before = len(proxy.log)
        run_here(job)
        assert len(proxy.log) - before == 3  # 16 images each
    assert finish_job(job)["errors"] == 0


def test_expired_credentials_are_not_unreadable_images(
    server: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object that may not be read is an error row; if nothing may be read any more, no part is written."""
    with faulty(server) as proxy:
        connect(monkeypatch, proxy.endpoint)
        job = open_job(make_request(f"s3://{BUCKET}/photos", tmp_path / "out"))
        proxy.denied = ["photos/"]
        with pytest.raises(StorageError) as error:
            run_here(job)
        assert error.value.code == "access_denied"
        assert not list((tmp_path / "out").glob("part-*"))
        proxy.denied = ["photos/0/003.png"]
        run_here(job)
        assert finish_job(job)["error_codes"] == {"access_denied": 1, "image_unsupported": 1}


@pytest.mark.parametrize("denial", ["403", "400"])
def test_a_token_that_expires_for_a_while(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denial: str
) -> None:
    """Some images are denied, then the token is refreshed: no row may say that they cannot be read."""
    with faulty(server) as proxy:
        connect(monkeypatch, proxy.endpoint)
        job = open_job(make_request(f"s3://{BUCKET}/photos", tmp_path / "out"))
        proxy.denied, proxy.denial, proxy.denials = ["photos/"], denial, 3
        with pytest.raises(StorageError) as error:
            run_here(job)
        assert error.value.code == "access_denied"
        assert not list((tmp_path / "out").glob("part-*"))
        proxy.denials = -1
        with pytest.raises(StorageError):
            run_here(job)
        assert not list((tmp_path / "out").glob("part-*"))
        proxy.denied = []
        run_here(job)
        assert finish_job(job)["error_codes"] == {"image_unsupported": 1}


def test_access_is_checked_for_each_input(
    server: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bucket that can be read says nothing about the credentials of this one."""
    for name in ("a/1.png", "b/1.png"):
        server.put(f"{tmp_path.name}/{name}", photo(1))
    with faulty(server) as proxy:
        connect(monkeypatch, proxy.endpoint)
        job = open_job(make_request((f"{prefix}/a/", f"{prefix}/b/"), tmp_path / "out"))
        proxy.denied = [f"{tmp_path.name}/a/"]
        with pytest.raises(StorageError) as error:
            run_here(job)
        assert error.value.code == "access_denied"


@pytest.mark.slow
def test_a_dead_store_ends_the_command_with_a_sentence(server: ObjectServer, prefix: str, tmp_path: Path) -> None:
    with faulty(server) as proxy:
        variables = environment(proxy.endpoint, timeout=6)
        out = f"{prefix}/out"
        flags = ["--out", out, "--chunk-size", str(CHUNK_SIZE), "--top", "2", "--json"]
        command = ["predict", MODEL, f"s3://{BUCKET}/photos/", *flags]
        stderr = run_until_dead(command, proxy, variables)
        assert "did not respond" in stderr
        assert "type the same command again" in stderr
        proxy.rates = {}
        done = run(*command, **variables)
        assert done.returncode == 3, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["images"], summary["errors"]) == (31, 1)
        assert summary["created"] < summary["parts"]  # the first command had written some


def run_until_dead(command: list[str], proxy: FaultProxy, variables: dict[str, str]) -> str:
    """Start a command, and let the store die after its first part; return what the command says."""
    import os

    words = [sys.executable, "-m", "patchword", *command]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | variables) as process:
        end = time.monotonic() + 120
        while not any(method == "PUT" and "/part-" in path for method, path, _ in list(proxy.log)):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        proxy.rates = {"503": 1.0}
        stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 2, stderr
    assert "Traceback" not in stderr
    return stderr


def test_small_jobs_take_urls(
    server: ObjectServer, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(monkeypatch, server.endpoint)
    photos = f"s3://{BUCKET}/photos"
    done = run_in_process(capsys, "predict", MODEL, f"{photos}/", f"{photos}/0/000.png", "--json")
    assert done.returncode == 3, done.stderr
    rows = json.loads(done.stdout)
    assert [row["path"] for row in rows] == [f"{photos}/{key}" for key in sorted(PHOTOS)] + [f"{photos}/0/000.png"]
    assert rows[0]["predictions"] == rows[-1]["predictions"]
    assert run_in_process(capsys, "predict", MODEL, f"{prefix}/nothing/").returncode == 2
