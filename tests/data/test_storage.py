"""The contract of storage: a local directory and a real object server, which a proxy makes fail."""

import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.object_server import BUCKET, ObjectServer, environment, faulty, serve_objects
from patchword.data.object_storage import MAX_REQUEST_BYTES
from patchword.data.storage import LocalStorage, Storage, StorageOpener, is_remote, open_object, open_storage
from patchword.errors import ConfigError, PatchwordError, StorageError

KEYS = ("a-b/1.jpg", "a.jpg", "a/1.jpg", "a/b/c.jpg", "b c#%20ü.jpg", "part-00000001.parquet")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with serve_objects() as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "store")
    server = request.getfixturevalue("server")
    for name, value in environment(server.endpoint).items():
        monkeypatch.setenv(name, value)
    return open_storage(f"s3://{BUCKET}/{tmp_path.name}")


def connect(monkeypatch: pytest.MonkeyPatch, endpoint: str, prefix: str, timeout: float = 60) -> Storage:
    for name, value in environment(endpoint, timeout).items():
        monkeypatch.setenv(name, value)
    return open_storage(f"s3://{BUCKET}/{prefix}")


def code_of(call: object, *arguments: object) -> str:
    with pytest.raises(StorageError) as error:
        call(*arguments)  # type: ignore[operator]
    return error.value.code


# ---- the contract


def test_create_list_head_read(storage: Storage) -> None:
    for key in reversed(KEYS):
        assert storage.create(key, key.encode())
    found = list(storage.list())
    assert [each.key for each in found] == sorted(KEYS)
    assert [each.size for each in found] == [len(key.encode()) for key in sorted(KEYS)]
    assert found == [storage.head(each.key) for each in found]
    assert [each.key for each in storage.list("a")] == [each.key for each in storage.list("a/")] == list(KEYS[2:4])
    assert list(storage.list("part")) == [] if is_remote(storage.url) else code_of(list, storage.list("part"))
    for each in found:
        assert storage.read(each.key) == storage.read(each.key, each.etag) == each.key.encode()
    assert storage.head("missing") is None
    assert code_of(storage.read, "missing") == "object_not_found"
    assert str(storage.join("a/1.jpg")).endswith("a/1.jpg")


def test_the_first_writer_wins(storage: Storage) -> None:
    barrier = threading.Barrier(8)

    def write(writer: int) -> bool:
        barrier.wait()
        return storage.create("folder/part", bytes([writer]) * 1000)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert sum(won) == 1
    assert storage.read("folder/part") == bytes([won.index(True)]) * 1000
    assert [each.key for each in storage.list()] == ["folder/part"]


def test_ranges(storage: Storage) -> None:
    content = os.urandom(MAX_REQUEST_BYTES + 1000)  # in more than one request
    storage.create("large", content)
    storage.create("empty", b"")
    version = storage.head("large")
    assert version is not None
    assert storage.read("large", version.etag) == content
    assert storage.read("empty") == b""
    for start, stop in (
        (0, 10),
        (5, 5),
        (1, len(content)),
        (len(content) - 5, len(content) + 5),
        (len(content), 2**30),
    ):
        assert storage.read_range("large", start, stop, version.etag) == content[start:stop]
    assert storage.read_range("empty", 0, 10) == b""


def test_a_changed_object_is_never_read(storage: Storage, request: pytest.FixtureRequest) -> None:
    storage.create("a/image.jpg", b"before")
    before = storage.head("a/image.jpg")
    assert before is not None
    if isinstance(storage, LocalStorage):
        Path(storage.join("a/image.jpg")).write_bytes(b"behind")
    else:
        request.getfixturevalue("server").put(f"{storage.url.removeprefix(f's3://{BUCKET}/')}/a/image.jpg", b"behind")
    assert code_of(storage.read, "a/image.jpg", before.etag) == "object_changed"
    assert code_of(storage.read_range, "a/image.jpg", 0, 3, before.etag) == "object_changed"
    assert storage.read("a/image.jpg") == b"behind"


def test_storages_can_be_sent_to_other_processes(storage: Storage) -> None:
    storage.create("a", b"1")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"1"


# ---- references


def test_references() -> None:
    assert all(
        map(is_remote, ("s3://b/k", "S3://b", "gs://b/k", "az://c/k", "abfss://c@account.dfs.core.windows.net/k"))
    )
    assert not any(map(is_remote, ("photos", Path("photos"), "s3:/b", "https://host/x", "hf:owner/name", "./s3", "")))
    local, key = open_object("shards/000.tar")
    assert (local.url, key) == ("shards", "000.tar")


def test_references_of_objects(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, server.endpoint, "x")
    storage, key = open_object(f"s3://{BUCKET}/shards/000.tar")
    assert (storage.url, key) == (f"s3://{BUCKET}/shards", "000.tar")
    assert code_of(open_object, "s3://bucket") == "invalid_reference"
    monkeypatch.setenv("PATCHWORD_STORAGE_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="PATCHWORD_STORAGE_TIMEOUT"):
        open_storage("s3://bucket")


def test_objects_of_a_bucket_share_a_client(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, server.endpoint, "")
    for key in ("x.png", "many/é %20/x.png"):
        server.put(key, key.encode())
    opener = StorageOpener()
    first, second = (opener.open_object(f"s3://{BUCKET}/{key}") for key in ("x.png", "many/é %20/x.png"))
    assert first[0] is second[0]
    assert [storage.read(key).decode() for storage, key in (first, second)] == ["x.png", "many/é %20/x.png"]
    assert second[0].join(second[1]) == f"s3://{BUCKET}/many/é %20/x.png"
    for wrong in (f"s3://{BUCKET}", f"s3://{BUCKET}/", f"s3://{BUCKET}//x.png"):
        assert code_of(opener.open_object, wrong) == "invalid_reference"


def test_clients_of_gcs_and_azure_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not run against a server: there is none here."""
    pytest.importorskip("obstore")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    assert code_of(open_storage, "az://container/photos") == "invalid_reference"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_storage("az://container/photos/").url == "az://container/photos"
    assert open_storage("gs://bucket/photos").join("1.jpg") == "gs://bucket/photos/1.jpg"


# ---- a local directory


def test_local_listing(tmp_path: Path) -> None:
    for name in ("b.jpg", ".hidden", "sub/a.jpg", ".git/x", ".b.jpg.1234.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "sub/cycle").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    assert [each.key for each in open_storage(tmp_path).list()] == ["b.jpg", "sub/a.jpg"]
    assert code_of(list, open_storage(tmp_path / "missing").list()) == "object_not_found"


def test_local_errors_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(StorageError, match=r"cannot be written \(.+\)"):
        open_storage(tmp_path).create("file/below", b"1")
    with pytest.raises(StorageError, match=r"cannot be read \(.+\)"):
        open_storage(tmp_path).read("")
    assert code_of(open_storage(tmp_path).read, "") == "object_not_found"  # as `head`: no object
    assert code_of(open_storage(tmp_path).read, "file/below") == "object_not_found"


# ---- an object server that fails

RATES = {"500": 0.1, "503": 0.1, "reset": 0.1, "lost": 0.1, "stall": 0.03, "truncate": 0.1, "conflict": 0.1}


def test_operations_survive_faults(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two thirds of all requests fail; each operation has the same result as without the proxy."""
    with faulty(server, RATES) as proxy:
        storage = connect(monkeypatch, proxy.endpoint, tmp_path.name, timeout=12)
        storage.timeout = 120  # type: ignore[attr-defined]  # stalls end after two seconds, but many retries may follow
        keys = [f"{i:02}" for i in range(12)]
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda key: storage.create(key, key.encode() * 1000) in (True, False), keys))
            assert list(pool.map(storage.read, keys)) == [key.encode() * 1000 for key in keys]
            assert set(pool.map(lambda key: storage.create(key, b"other"), keys)) == {False}
        assert [each.key for each in storage.list()] == keys
        assert {"500", "503", "reset", "lost", "truncate", "conflict"} <= set(proxy.faults())


@pytest.mark.parametrize("fault", ["500", "503", "reset", "lost", "stall", "truncate", "conflict"])
def test_each_fault(fault: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with faulty(server) as proxy:
        storage = connect(monkeypatch, proxy.endpoint, tmp_path.name, timeout=6)
        storage.timeout = 60  # type: ignore[attr-defined]
        proxy.script = [fault]
        created = storage.create("key", b"content" * 100)
        assert created or fault in ("lost", "truncate")  # then the retry finds what the first request wrote
        proxy.script = [fault, fault]
        assert storage.read("key") == b"content" * 100
        proxy.script = [fault]
        assert [each.key for each in storage.list()] == ["key"]
        assert server.get(f"{tmp_path.name}/key") == b"content" * 100


def test_a_listing_continues_where_it_broke_off(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "long listing"
    keys = [f"{i:04}" for i in range(1100)]  # two pages
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: server.put(f"{prefix}/{key}", b"1"), keys))
    with faulty(server) as proxy:
        proxy.script = ["", "503", "truncate"]
        storage = connect(monkeypatch, proxy.endpoint, prefix)
        assert [each.key for each in storage.list()] == keys
        assert [fault for _, _, fault in proxy.log] == ["", "503", "truncate", ""]


def test_a_dead_store_is_one_sentence(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with faulty(server, {"503": 1.0}) as proxy:
        storage = connect(monkeypatch, proxy.endpoint, "dead", timeout=1)
        assert code_of(storage.create, "a", b"1") == "storage_unreachable"
        assert code_of(storage.read, "a") == "storage_unreachable"
        assert code_of(storage.head, "a") == "storage_unreachable"
        assert code_of(list, storage.list()) == "storage_unreachable"
    with pytest.raises(StorageError, match=r"s3://bucket/dead/a cannot be read: .* type the same command again"):
        storage.read("a")  # nobody listens any more


def test_permanent_errors_are_not_retried(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty(server) as proxy:
        connect(monkeypatch, proxy.endpoint, "x")
        missing = open_storage("s3://no-such-bucket/x")
        assert code_of(list, missing.list()) == "object_not_found"
        assert code_of(missing.create, "a", b"1") == "object_not_found"
        assert len(proxy.log) == 2
        assert code_of(open_storage(f"s3://{BUCKET}/x").read, "a//b") == "invalid_key"


def test_an_expired_token_is_denied_access(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 responds with 400, not 403."""
    with faulty(server) as proxy:
        storage = connect(monkeypatch, proxy.endpoint, "expired")
        storage.create("a", b"1")
        proxy.denied, proxy.denial = ["a"], "400"
        assert code_of(storage.read, "a") == "access_denied"


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(PatchwordError, match=r"s3://bucket needs the package obstore: .*remote"):
        open_storage("s3://bucket")


def test_endpoint_without_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Obstore would crash with a panic at the first request."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:5000")
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:5000.*http://") as error:
        open_storage("s3://bucket/photos")
    assert error.value.code == "invalid_reference"
