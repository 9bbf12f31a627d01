"""Downloads from a hub on a local HTTP server."""

import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir

from helpers.hub_server import REPO, SMALL, WEIGHTS, Hub, settings  # noqa: F401  # `settings` is an autouse fixture
from patchword.checkpoints import hub
from patchword.errors import HubError


@pytest.fixture
def server() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.stop()


def fetch(server: Hub, cache: Path, reference: str = f"hf:{REPO}") -> Path:
    return hub.download_model(reference, cache=cache, endpoint=server.endpoint)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_downloads_the_model_and_nothing_else(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # makes the library show its bars without a terminal
    model = {**server.files, "preprocessor_config.json": b"{}", "model.json": b"{}"}
    server.files = {**model, "README.md": b"#", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"other"}
    assert contents(fetch(server, tmp_path)) == model
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "100%" in printed.err


def test_second_call_needs_neither_download_nor_hash_nor_hub(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(server, tmp_path)
    server.log.clear()
    monkeypatch.setattr(hub, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert fetch(server, tmp_path) == first
    assert server.log == []
    server.stop()
    assert fetch(server, tmp_path) == first
    assert fetch(server, tmp_path, f"hf:{REPO}@{server.commit}") == first
    assert not scan_cache_dir(tmp_path).warnings  # our marker files do not disturb the library's own tools


def test_offline_mode(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(server, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(server, tmp_path) == folder
    with pytest.raises(HubError, match=r"\(revision main\).*/empty/.*HF_HUB_OFFLINE"):
        fetch(server, tmp_path / "empty")


def test_uses_and_verifies_the_cache_of_other_programs(server: Hub, tmp_path: Path) -> None:
    path = Path(hf_hub_download(REPO, WEIGHTS, revision=server.commit, cache_dir=tmp_path, endpoint=server.endpoint))
    server.stop()
    assert fetch(server, tmp_path, f"hf:{REPO}@{server.commit}") == path.parent
    path.resolve().write_bytes(b"damaged")
    with pytest.raises(HubError, match=f"{WEIGHTS} .*SHA-256"):
        fetch(server, tmp_path, f"hf:{REPO}@{server.commit}")


def test_follows_a_branch(server: Hub, tmp_path: Path) -> None:
    old = fetch(server, tmp_path)
    server.commit, server.files[WEIGHTS] = "2" * 40, SMALL[::-1]
    new = fetch(server, tmp_path)
    server.stop()
    assert fetch(server, tmp_path) == new != old
    assert (new / WEIGHTS).read_bytes() == SMALL[::-1]
    assert (old / WEIGHTS).read_bytes() == SMALL


def test_damaged_download_is_refused_and_deleted(server: Hub, tmp_path: Path) -> None:
    server.wrong[WEIGHTS] = SMALL[:-1] + bytes([SMALL[-1] ^ 1])
    with pytest.raises(HubError, match=f"{WEIGHTS} .*SHA-256"):
        fetch(server, tmp_path)
    assert not any(path.read_bytes() == server.wrong[WEIGHTS] for path in tmp_path.rglob("*") if path.is_file())
    server.wrong.clear()
    assert contents(fetch(server, tmp_path)) == server.files


def test_file_changed_in_the_cache_is_detected(server: Hub, tmp_path: Path) -> None:
    (fetch(server, tmp_path) / WEIGHTS).resolve().write_bytes(SMALL[::-1])
    with pytest.raises(HubError, match=f"{WEIGHTS} .*SHA-256"):
        fetch(server, tmp_path)
    assert contents(fetch(server, tmp_path)) == server.files


def test_cut_connection_is_resumed(server: Hub, tmp_path: Path) -> None:
    chunk = constants.DOWNLOAD_CHUNK_SIZE  # the library keeps whole chunks only
    server.files[WEIGHTS] = random.Random(1).randbytes(chunk + 2_000_000)
    server.cuts = [(chunk + 1_000_000, False)]
    assert contents(fetch(server, tmp_path)) == server.files
    assert server.log[-1] == ("GET", WEIGHTS, f"bytes={chunk}-")


@pytest.mark.parametrize("cuts", [[(50_000, True)], [(0, False)] * 6], ids=["reset once", "cut six times"])
def test_lost_connection_is_an_error_and_the_next_call_succeeds(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    server.cuts = list(cuts)
    with pytest.raises(HubError, match=rf"{REPO} .*{server.endpoint} \(\w+: "):
        fetch(server, tmp_path)
    assert server.cuts == []
    assert contents(fetch(server, tmp_path)) == server.files


def test_unreachable_hub(server: Hub, tmp_path: Path) -> None:
    server.stop()
    with pytest.raises(HubError, match=rf"{REPO} .*{server.endpoint} \(\w+: .*HF_ENDPOINT.*HF_HUB_OFFLINE"):
        fetch(server, tmp_path)


def test_silent_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(HubError, match="ReadTimeout"):
        hub.download_model(f"hf:{REPO}", cache=tmp_path, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, rf"{REPO} \(HTTP 404\)"),
        (404, {}, rf"{REPO} \(HTTP 404\)"),
        (401, {}, rf"{REPO} \(HTTP 401\).*HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, rf"^{REPO} .*http.*/{REPO}, .*HF_TOKEN"),
        (503, {}, rf"{REPO} .*\(\w+: .*503"),
        (200, {"Content-Type": "text/html"}, rf"{REPO} .*\(JSONDecodeError: "),
    ],
)
def test_http_errors(server: Hub, tmp_path: Path, status: int, headers: dict[str, str], message: str) -> None:
    server.refusal = status, headers
    with pytest.raises(HubError, match=message):
        fetch(server, tmp_path)


def test_unknown_names(server: Hub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"owner/vti \(HTTP 404\)"):
        fetch(server, tmp_path, "hf:owner/vti")
    with pytest.raises(HubError, match=f"{REPO} .*{server.endpoint} .*'v9'.*@v9"):
        fetch(server, tmp_path, f"hf:{REPO}@v9")


@pytest.mark.parametrize(
    "reference",
    ["hf:", "hf:vit", "owner/vit", "hf:owner/vit/x", "hf:owner/vit@", "hf:a/b@../../etc", "hf:a b/c", "hf:-a/b--c"],
)
def test_malformed_references(reference: str, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=rf"{re.escape(repr(reference))} .*hf:google/vit-base-patch16-224"):
        hub.download_model(reference, cache=tmp_path)


SHARDS = {"model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
INDEX = {"model.safetensors.index.json": b"{}"}


@pytest.mark.parametrize(
    "files",
    [{**INDEX, **SHARDS}, {"vit.safetensors": b"s"}, {"pytorch_model.bin": b"b"}, {"v.pth": b"p"}, {"v.npz": b"n"}],
    ids=["shards", "other name", "bin", "pth", "npz"],
)
def test_other_kinds_of_weights(server: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    server.files = files
    assert contents(fetch(server, tmp_path)) == files
    server.stop()
    assert contents(fetch(server, tmp_path)) == files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.npz": b"a", "b.npz": b"b"}, r"'a\.npz', 'b\.npz'"),
        ({"tf_model.h5": b"h", "onnx/vit.safetensors": b"o"}, r"\(.*\.safetensors.*\); .*tf_model\.h5"),
        (SHARDS, r"00002-of-00002.*model\.safetensors\.index\.json"),
        ({**INDEX, "model-00002-of-00002.safetensors": b"two"}, r"00002-of-00002.*model\.safetensors\.index\.json"),
    ],
)
def test_repositories_without_a_single_model(
    server: Hub, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    server.files = files
    with pytest.raises(HubError, match=message):
        fetch(server, tmp_path)
    assert server.downloads() == []


def test_mirror_with_xet_headers_is_read_over_http(server: Hub, tmp_path: Path) -> None:
    server.headers = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": f"{server.endpoint}/api/xet"}
    assert contents(fetch(server, tmp_path)) == server.files


def test_unwritable_cache(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HubError, match=rf"{REPO} .*{re.escape(str(tmp_path / 'file'))}.*HF_HOME"):
        fetch(server, tmp_path / "file")
