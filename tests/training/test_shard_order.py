"""Runs on indexed shards in one to four processes: the same sample log, and shards that each process reads alone."""

from pathlib import Path

import pytest

from helpers.runs import assert_exit_codes, shared_fork_server, start_ranks, tiny_config, write_recipe
from helpers.tar_shards import write_shards
from patchword.config import AugmentConfig, DataConfig, ViTConfig
from patchword.data.build_index import build_index

STEPS, BATCH_SIZE, NUM_SHARDS, SHARD_SIZE = 9, 24, 24, 10
TINY = ViTConfig(image_size=(16, 16), patch_size=(8, 8), embed_dim=16, depth=1, num_heads=2, mlp_dim=32)


def read_log(path: Path) -> dict[int, int]:
    """Return the sample at each position that a process logged."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(position): int(index) for position, index in map(str.split, lines)}


@pytest.mark.slow
def test_sample_log_is_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", {f"train-{n:03d}": SHARD_SIZE for n in range(NUM_SHARDS)} | {"val-0": 6})
    build_index(str(folder))
    config = tiny_config(
        data=DataConfig(source=str(folder), num_workers=2, lanes=12, shuffle_window=4),
        model=TINY,
        augment=AugmentConfig(crop="resized", mixup=0.2),
        batch_size=BATCH_SIZE,
        grad_accum_steps=1,
        steps=STEPS,
        save_every=3600.0,
    )
    recipe = write_recipe(tmp_path / "recipe.py", config)
    logs: dict[int, list[dict[int, int]]] = {}
    for world_size in (1, 2, 3, 4):
        run, log = tmp_path / f"run-{world_size}", tmp_path / f"log-{world_size}"
        children = start_ranks(shared_fork_server(), world_size, recipe, run, log)
        assert_exit_codes(children, 0)
        logs[world_size] = [read_log(Path(f"{log}.{rank}")) for rank in range(world_size)]
    # Threads may load a few batches more than the steps; these differ.
    steps = range(STEPS * BATCH_SIZE)
    merged = {world: {p: i for part in parts for p, i in part.items()} for world, parts in logs.items()}
    samples = {world: [found[position] for position in steps] for world, found in merged.items()}
    assert samples[1] == samples[2] == samples[3] == samples[4]
    assert len(set(samples[1])) == STEPS * BATCH_SIZE
    for world in (2, 3, 4):
        shards = [{part[p] // SHARD_SIZE for p in part if p in steps} for part in logs[world]]
        shared = sum(len(shards[a] & shards[b]) for a in range(world) for b in range(a))
        assert shared <= world - 1  # one where the lanes of two processes meet
