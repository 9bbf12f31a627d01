"""The index of a dataset of the size of ImageNet-21k: seconds and memory to open it, and to order an epoch.

    python benchmarks/scale_index.py [--rows 14000000]

The shards are sparse files and the rows are synthetic; the index is a real one, opened as training opens it. Prints
JSON; `benchmarks/scale.py` writes it to results/scale.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from patchword.data.shard_index import INDEX_FILE, IndexedShard, ShardRows, write_index
from patchword.data.sources import split_from_path
from patchword.data.storage import open_storage

ROWS_PER_SHARD, NUM_CLASSES, IMAGE_BYTES, VAL_SHARDS = 1000, 21_841, 110_000, 50

OPEN = """
import json, sys, time
import pyarrow, torch
from patchword.config import Config, DataConfig
from patchword.data.resolve import open_data
from patchword.data.lane_sampler import make_sampler

def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(lines[name].split()[0]) / 1000 for name in ("RssAnon", "RssFile")}

config = Config(data=DataConfig(source=sys.argv[1]), batch_size=4096)
before, start = memory(), time.perf_counter()
splits = open_data(config.data, seed=0)
opened, after = time.perf_counter() - start, memory()
sampler = make_sampler(splits.train, config)
start = time.perf_counter()
sampler(10**9, 10**9 + 4096)
batch = time.perf_counter() - start
start = time.perf_counter()
for first in range(0, len(splits.train), 2**17):  # an epoch, as all processes together compute it
    sampler(first, min(first + 2**17, len(splits.train)))
epoch, last = time.perf_counter() - start, memory()
result = {"train_images": len(splits.train), "open_seconds": opened, "batch_order_seconds": batch,
          "epoch_order_seconds": epoch}
for name, kind in (("RssFile", "shared_mb"), ("RssAnon", "private_mb")):
    result["open_" + kind] = after[name] - before[name]
    result["train_" + kind] = last[name] - before[name]
print(json.dumps(result))
"""


def measure(rows: int = 14_000_000) -> dict[str, Any]:
    """Write an index of this many rows, and measure in a child process how it is opened and ordered.

    Returns:
        Seconds to open the data, to order one batch in the middle, and to order an epoch; the growth of memory, in MB,
        after opening (`open_`) and after an epoch (`train_`): of pages of files, which processes share, and of others.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_synthetic(folder, rows)
        index_mb = (folder / INDEX_FILE).stat().st_size / 1e6
        child = subprocess.run([sys.executable, "-c", OPEN, name], stdout=subprocess.PIPE, text=True, check=True)
    return {"rows": rows, "index_mb": round(index_mb), **{k: round(v, 3) for k, v in json.loads(child.stdout).items()}}


def write_synthetic(folder: Path, rows: int) -> None:
    """Write sparse shards and an index of synthetic rows."""
    num_shards = -(-rows // ROWS_PER_SHARD)
    names = [f"train-{number:06d}.tar" for number in range(num_shards)]
    names[-min(VAL_SHARDS, num_shards // 2) :] = [f"val-{n:06d}.tar" for n in range(min(VAL_SHARDS, num_shards // 2))]
    rng, shards, columns = np.random.default_rng(0), [], []
    for number, name in enumerate(names):
        count = min(ROWS_PER_SHARD, rows - number * ROWS_PER_SHARD)
        with open(folder / name, "wb") as file:
            file.truncate((IMAGE_BYTES + 2048) * count)
        columns.append(synthetic_rows(number, count, rng))
    versions = {each.key: each for each in open_storage(folder).list()}
    for name, each in zip(names, columns, strict=True):
        stored, split = versions[name], split_from_path(name)
        shards.append(IndexedShard(name, stored.size, stored.etag, split, len(each.offsets), each.digest()))
    write_index(folder / INDEX_FILE, shards, columns, [])


def synthetic_rows(number: int, count: int, rng: np.random.Generator) -> ShardRows:
    """Return the rows of one shard; the first shards have every class."""
    keys = [f"n{number:08d}_{i:05d}.JPEG".encode() for i in range(count)]
    classes = rng.integers(0, NUM_CLASSES, count)
    in_turn = number * 218 + np.arange(min(218, count))
    classes[: len(in_turn)] = in_turn % NUM_CLASSES
    used, codes = np.unique(classes, return_inverse=True)
    return ShardRows(
        b"".join(keys),
        np.array([len(key) for key in keys], np.int64),
        np.arange(count, dtype=np.int64) * (IMAGE_BYTES + 2048) + 512,
        np.full(count, IMAGE_BYTES, np.uint32),
        [(f"n{code:08d}",) for code in used],
        codes.astype(np.int64),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=14_000_000)
    result = measure(parser.parse_args().rows)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
