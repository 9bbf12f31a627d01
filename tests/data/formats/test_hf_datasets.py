"""Hugging Face datasets by name, against a local HTTP server with the endpoints of the hub.

The libraries read HF_ENDPOINT and their cache directory when they are imported, so each test runs a new process.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

datasets = pytest.importorskip("datasets", reason="needs the extra [data]")

REPO = "owner/photos"
COMMIT = "1" * 40

OPEN_DATASET = """
import json, sys
import numpy as np
from patchword.data.resolve import resolve_dataset
from patchword.errors import PatchwordError
try:
    dataset = resolve_dataset(sys.argv[1])
except PatchwordError as error:
    print(json.dumps({"code": error.code, "message": str(error)}))
else:
    gray = lambda source, index: int(np.asarray(source.read(index, mode="L"))[0, 0])
    splits = {
        name: {"labels": source.labels, "targets": source.targets.tolist(), "gray": [gray(source, i) for i in range(len(source))]}
        for name, source in dataset.splits.items()
    }
    print(json.dumps({"splits": splits, "notes": [note.code for note in dataset.notes]}))
"""  # noqa: E501


class DatasetHub(ThreadingHTTPServer):
    """A hub with one dataset repository of one commit."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.log: list[str] = []


class Handler(BaseHTTPRequestHandler):
    """The few endpoints that `datasets.load_dataset` uses."""

    server: DatasetHub

    def log_message(self, format: str, *args: object) -> None:
        """Keep standard error clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = [path for path in self.server.files if path.replace("/", "%2F") in body or path in body]
        self.reply_json([self.entry(path) for path in paths])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.log.append(path)
        api, files = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self.reply_json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            self.reply_json(self.list_folder(path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")))
        elif path.startswith(files) and (name := path.removeprefix(files).partition("/")[2]) in self.server.files:
            content = self.server.files[name]
            etag = hashlib.sha1(content).hexdigest()
            self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        elif path.startswith((api, files)):
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def list_folder(self, folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        inside = [name for name in self.server.files if name.startswith(prefix)]
        folders = {prefix + name.removeprefix(prefix).partition("/")[0] for name in inside} - set(inside)
        directories = [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)]
        return directories + [self.entry(name) for name in inside if "/" not in name.removeprefix(prefix)]

    def entry(self, name: str) -> dict[str, Any]:
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def reply_json(self, content: object) -> None:
        self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def make_parquet(grays: list[int], labels: list[int]) -> bytes:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["zoo", "arc"])})
    images = []
    for gray in grays:
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (gray, gray, gray)).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    file = io.BytesIO()
    datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(file)
    return file.getvalue()


@pytest.fixture
def hub() -> Iterator[DatasetHub]:
    files = {
        "data/train-00000-of-00001.parquet": make_parquet([10, 20, 30, 40], [0, 1, 0, 1]),
        "data/test-00000-of-00001.parquet": make_parquet([50], [1]),
    }
    server = DatasetHub(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def open_in_new_process(reference: str, endpoint: str, home: Path, **environment: str) -> Any:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment}
    env = {key: value for key, value in env.items() if key not in ("HF_HUB_CACHE", "HF_DATASETS_CACHE")}
    command = [sys.executable, "-c", OPEN_DATASET, reference]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_hub_dataset_is_downloaded_then_read_from_the_cache(hub: DatasetHub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    expected = {
        "train": {"labels": ["zoo", "arc"], "targets": [0, 1, 0, 1], "gray": [10, 20, 30, 40]},
        "test": {"labels": ["zoo", "arc"], "targets": [1], "gray": [50]},
    }
    first = open_in_new_process(f"hf-datasets:{REPO}", endpoint, tmp_path)
    assert first == {"splits": expected, "notes": []}
    assert any(path.endswith(".parquet") for path in hub.log)
    offline = open_in_new_process(f"hf-datasets:{REPO}", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert offline["splits"] == expected


@pytest.mark.slow
def test_unknown_dataset_and_missing_network_are_hub_errors(hub: DatasetHub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    unknown = open_in_new_process("hf-datasets:owner/unknown", endpoint, tmp_path)
    assert unknown["code"] == "hub_failed"
    assert "owner/unknown" in unknown["message"]
    offline = open_in_new_process(f"hf-datasets:{REPO}", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert offline["code"] == "hub_failed"
    assert REPO in offline["message"]
