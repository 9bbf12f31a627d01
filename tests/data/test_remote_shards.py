"""Training from a real S3-compatible server: the same bits as from disk, few requests, and sentences for mistakes."""

import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch

from helpers.command import run_in_process
from helpers.object_server import BUCKET, ObjectServer, environment, faulty, serve_objects
from helpers.runs import final_state, shared_fork_server, signal_env, start_or_resume, write_recipe
from helpers.tar_shards import contents, samples, write_shards, write_tar
from patchword.config import AugmentConfig, Config, DataConfig, ViTConfig
from patchword.data.build_index import build_index
from patchword.data.formats.indexed_shards import IndexedSource
from patchword.data.lane_sampler import LaneSampler, make_sampler
from patchword.data.loader import Loader
from patchword.data.preprocess import HALF, Preprocess
from patchword.data.resolve import open_data, resolve_dataset
from patchword.data.shard_cache import ShardCache
from patchword.data.shard_index import INDEX_FILE
from patchword.errors import ConfigError, DataError, StorageError
from patchword.training import train

SIZES = {"train-000": 30, "train-001": 25, "train-002": 33, "val-000": 12}
TINY = ViTConfig(image_size=(16, 16), patch_size=(4, 4), embed_dim=16, depth=1, num_heads=2, mlp_dim=32)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with serve_objects() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", SIZES)


@pytest.fixture
def url(server: ObjectServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The shards in a bucket, without an index."""
    connect(monkeypatch, server.endpoint)
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))
    for path in folder.glob("*.tar"):
        server.put(f"{tmp_path.name}/{path.name}", path.read_bytes())
    return f"s3://{BUCKET}/{tmp_path.name}"


def connect(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)


def config(source: str | Path, **data: object) -> Config:
    return Config(
        data=DataConfig(source=str(source), num_workers=2, lanes=4, shuffle_window=8, **data),  # type: ignore[arg-type]
        model=TINY,
        augment=AugmentConfig(crop="resized", flip=0.5, mixup=0.2),
        batch_size=16,
        steps=12,
        eval_every=1,
        precision="fp32",
        num_threads=1,
    )


def test_index_and_splits_are_those_of_the_same_files_on_disk(url: str, folder: Path) -> None:
    assert build_index(url).written
    assert not build_index(url).written
    build_index(str(folder))
    remote, local = (resolve_dataset(str(each)).splits for each in (f"{url}/", folder))
    for name in ("train", "val"):
        assert contents(remote[name]) == contents(local[name])
        assert remote[name].name(0) == f"{url}/{remote[name].key(0)}"
    infos = [open_data(DataConfig(source=str(each)), 0).split_info for each in (url, folder)]
    assert infos[0] == infos[1]
    assert len(resolve_dataset(f"{url}/train-{{000..001}}.tar").splits["train"]) == 55
    assert len(resolve_dataset(f"{url}/train-00*.tar").splits["train"]) == 88
    assert len(resolve_dataset(f"{url}/train-001.tar").splits["train"]) == 25


@pytest.mark.parametrize("shard_cache_gib", [1.0, 0.0])
def test_training_is_bit_identical_to_training_from_disk(
    url: str, folder: Path, tmp_path: Path, shard_cache_gib: float
) -> None:
    build_index(url)
    build_index(str(folder))
    for source, out in ((url, "remote"), (folder, "local")):
        assert train(config(source, shard_cache_gib=shard_cache_gib), tmp_path / out) is not None
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("remote", "local")]
    assert weights[0] == weights[1]
    cached = list((tmp_path / "cache/shards").glob("*/0*")) if shard_cache_gib else []
    assert bool(cached) == bool(shard_cache_gib)


@pytest.mark.slow
def test_killed_run_resumes_bit_identically(url: str, server: ObjectServer, tmp_path: Path) -> None:
    """With a validation set that is split off, in the middle of shards and windows, and with an empty cache."""
    build_index(url)
    recipe = write_recipe(tmp_path / "recipe.py", config(f"{url}/train-*.tar").replace(steps=20, save_every=0))
    variables = environment(server.endpoint) | {"PATCHWORD_CACHE": str(tmp_path / "cache")}
    child = shared_fork_server().start("train", recipe, "--out", tmp_path / "whole", **variables)
    assert child.wait() == 0, child.output()
    run = tmp_path / "run"
    for point in (3, "save", 9, 16):
        child = start_or_resume(shared_fork_server(), recipe, run, **variables, **signal_env(point))
        assert child.wait() == -signal.SIGKILL, child.output()
        shutil.rmtree(tmp_path / "cache")
    child = start_or_resume(shared_fork_server(), recipe, run, **variables)
    assert child.wait() == 0, child.output()
    assert final_state(run, 20) == final_state(tmp_path / "whole", 20)


def test_every_block_is_requested_once_in_an_epoch(
    url: str, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes with three loader threads each; blocks are smaller than shards, and the cache is shared."""
    build_index(url)
    block_bytes = 8192
    with faulty(server) as proxy:
        connect(monkeypatch, proxy.endpoint)
        settings = config(url)
        loaders = []
        for _ in range(4):
            source = open_data(settings.data, 0).train
            assert isinstance(source, IndexedSource)
            source.files.cache = ShardCache(source.files.storage, 1e9, block_bytes=block_bytes)
            sampler = make_sampler(source, settings)
            assert isinstance(sampler, LaneSampler)
            loaders.append(Loader(source, Preprocess((16, 16), mean=HALF, std=HALF), sampler=sampler, num_workers=3))
        proxy.log.clear()
        seen = []
        for rank, loader in enumerate(loaders):
            ranges = ((step * 16 + rank * 4, step * 16 + rank * 4 + 4) for step in range(88 // 16))
            seen += [index for batch in loader.train_batches(ranges) for index in batch.indices.tolist()]
        requests = Counter(unquote(path).rpartition("/")[2] for method, path, _ in proxy.log if method == "GET")
    assert len(set(seen)) == len(seen) == 80
    assert set(requests) == {"train-000.tar", "train-001.tar", "train-002.tar"}
    sizes = {shard.name: shard.size for shard in loaders[0].source.index.shards}  # type: ignore[attr-defined]
    for name, count in requests.items():
        assert count <= -(-sizes[name] // block_bytes)
    assert sum(requests.values()) > 3  # several blocks each


def test_small_cache_is_enough_for_reading_from_front_to_back(url: str) -> None:
    """Lanes and windows bound what is in use at a time: hardly a block is requested twice, though most go."""
    build_index(url)
    settings = config(url).replace(batch_size=4).replace(data=DataConfig(source=url, lanes=2, shuffle_window=2))
    source = open_data(settings.data, 0).train
    assert isinstance(source, IndexedSource)
    files, ranges = source.files, []
    read_range = files.storage.read_range

    def counted(key: str, start: int, stop: int, etag: str | None = None) -> bytes:
        ranges.append((key, start))
        return read_range(key, start, stop, etag)

    files.storage.read_range = counted  # type: ignore[method-assign]
    files.cache = ShardCache(files.storage, 12 * 4096, block_bytes=4096)  # of about 60 blocks
    for index in make_sampler(source, settings)(0, len(source))[0]:
        source.read(int(index), mode="RGB")
    assert len(set(ranges)) > 40
    assert len(ranges) <= 1.1 * len(set(ranges))


def test_faults_of_the_network_change_nothing(
    url: str, server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"500": 0.05, "503": 0.05, "reset": 0.05, "truncate": 0.05, "lost": 0.02}
    with faulty(server, rates, seed=3) as proxy:
        connect(monkeypatch, proxy.endpoint)
        build_index(url)
        remote = resolve_dataset(url, shard_cache_gib=0).splits["train"]
        found = contents(remote)
        assert proxy.faults().total() >= 3
    build_index(str(folder))
    assert found == contents(resolve_dataset(str(folder)).splits["train"])


# ---- mistakes


def test_missing_index(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = run_in_process(capsys, "train", "quickstart", "--data.source", url, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert f"There is no index.arrow in {url}. Write it once: patchword index {url}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_changed_shard(url: str, server: ObjectServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_index(url)
    source = resolve_dataset(url, shard_cache_gib=0).splits["train"]
    key = f"{url.rpartition('/')[2]}/train-000.tar"
    server.put(key, write_tar(folder / "train-000.tar", samples(500, 530)).read_bytes())
    with pytest.raises(StorageError, match=rf"train-000\.tar.*patchword index {url} --overwrite") as error:
        source.read(0, mode="RGB")
    assert error.value.code == "object_changed"
    with pytest.raises(StorageError, match=r"train-000\.tar.* changed"):
        resolve_dataset(url)
    assert run_in_process(capsys, "index", url).returncode == 2
    done = run_in_process(capsys, "index", url, "--overwrite")
    assert done.returncode == 0
    assert contents(resolve_dataset(url).splits["train"])[0][0] == "train-000.tar:00500.png"


def test_new_index_replaces_the_downloaded_one(url: str, server: ObjectServer, folder: Path, tmp_path: Path) -> None:
    build_index(url)
    old = resolve_dataset(url).splits["train"]
    server.put(f"{url.rpartition('/')[2]}/train-009.tar", (folder / "val-000.tar").read_bytes())
    assert [note.code for note in resolve_dataset(url).notes] == ["shards_not_indexed"]
    build_index(url, overwrite=True)
    assert len(resolve_dataset(url).splits["train"]) == 88 + 12
    assert len(list((tmp_path / "cache/indexes").glob("*/*.arrow"))) == 1
    assert old.key(87) == "train-002.tar:00087.png"


def test_without_obstore(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"needs the package obstore: .*\[remote\]"):
        open_data(DataConfig(source="s3://bucket/x"), 0)
    done = run_in_process(capsys, "index", "s3://bucket/x")
    assert done.returncode == 2
    assert "[remote]" in done.stderr


def test_bucket_that_does_not_exist(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_in_process(capsys, "index", "s3://no-such-bucket/x")
    assert done.returncode == 2
    assert "s3://no-such-bucket/x" in done.stderr
    with pytest.raises(DataError, match=r"no \.tar shards"):
        build_index(f"{url}/empty")


def test_cache_of_the_index_is_shared_by_processes(url: str, tmp_path: Path) -> None:
    build_index(url)
    splits = [resolve_dataset(url).splits["train"] for _ in range(2)]
    paths = list((tmp_path / "cache/indexes").glob("*/*.arrow"))
    assert len(paths) == 1
    shutil.copy(paths[0], tmp_path / INDEX_FILE)
    assert np.array_equal(splits[0].targets, splits[1].targets)
    assert torch.from_numpy(splits[0].targets).shape == (88,)
