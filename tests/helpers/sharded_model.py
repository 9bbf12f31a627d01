"""One of several processes that share a model; run by `runs.ForkServer`. Fails if a comparison does.

sharded_model.py restore RUN     restore the last checkpoint, compare it with the whole, and save it again
sharded_model.py full-disk RUN   the last process cannot write its fraction of a new checkpoint; prints the error
sharded_model.py families        sharded models of every family give the outputs of whole ones
sharded_model.py memory          weights, gradients and optimizer state of each process are its fraction
"""

import contextlib
import errno
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchword.config import Config, ModelConfig, ResNetConfig
from patchword.config.presets import preset
from patchword.data.resolve import open_data
from patchword.errors import CheckpointError
from patchword.models import build_model, optimize_for_cpu
from patchword.training.checkpointing import CheckpointStore, read_training_checkpoint
from patchword.training.distributed import ProcessGroup
from patchword.training.ema import local
from patchword.training.fsdp import Sharding
from patchword.training.run_dir import read_config, read_split
from patchword.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.families import FAMILY_CONFIGS


def open_trainer(run: Path, group: ProcessGroup) -> tuple[Trainer, CheckpointStore]:
    """Return a trainer of the run with its last checkpoint."""
    config = read_config(run).replace(parallel="fsdp")
    splits = open_data(config.data, config.seed, read_split(run))
    trainer = Trainer(config, splits, group, fresh=False)
    store = CheckpointStore(run, config.keep_last, group if group.shards(config) else None)
    loaded = store.load()
    assert loaded is not None
    if loaded.shards is None:
        trainer.restore(loaded.snapshot.step, loaded.model, loaded.snapshot.tensors)
    else:
        trainer.restore_shards(loaded.snapshot.step, loaded.shards)
    return trainer, store


def check_restored(run: Path, group: ProcessGroup) -> None:
    """Compare the state of a trainer, bit for bit, with the whole checkpoint, which every process reads."""
    trainer, store = open_trainer(run, group)
    folder = store.path(trainer.step)
    whole, _ = read_training_checkpoint(folder)
    tensors = trainer.sharded_tensors()
    assert tensors.keys() == whole.tensors.keys()
    for name, tensor in tensors.items():
        value = tensor if trainer.sharding is None else trainer.sharding.gather(tensor)
        assert torch.equal(value, whole.tensors[name]), name
    if trainer.sharding is not None:
        group.run_on_main(lambda: shutil.rmtree(folder))
        store.last_step = None
        store.save_sharded(whole, tensors, trainer.describe({}, {}))


def fail_to_write(run: Path, group: ProcessGroup) -> None:
    """Save a new checkpoint on a disk that is full for the last process."""
    trainer, store = open_trainer(run, group)
    snapshot, _ = read_training_checkpoint(store.path(trainer.step))
    if group.rank == group.size - 1:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full  # type: ignore[assignment]
    try:
        store.last_step = None
        later = replace(snapshot, step=snapshot.step + 1, best=None)
        store.save_sharded(later, trainer.sharded_tensors(), trainer.describe({}, {}))
    except CheckpointError as error:
        print(error.code, error)
    else:
        raise AssertionError("the save succeeded")


def example(config: ModelConfig) -> Tensor:
    """Return two images for a model."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, config.in_channels, *config.image_size, generator=generator)


def check_families(group: ProcessGroup) -> None:
    """Compare outputs and gradients of a sharded model, which only the main process has built, with a whole one."""
    resnet = ResNetConfig(image_size=(16, 16), layers=(1, 1), num_classes=5)
    hybrid = preset("R26+S/32", num_classes=5, image_size=64, depth=1)
    others = {"resnet": resnet, "sasa": resnet.replace(spatial="local"), "hybrid": hybrid}
    for name, config in {**FAMILY_CONFIGS, **others}.items():
        torch.manual_seed(0)
        whole = build_model(config)
        for parameter in whole.parameters():
            torch.nn.init.normal_(parameter, std=0.05)  # the head is zero otherwise
        optimize_for_cpu(whole).eval()
        images = example(config)
        expected = whole(images)
        expected.square().sum().backward()
        if group.is_main:
            model = build_model(config)
            model.load_state_dict(whole.state_dict())
        else:
            with torch.device("meta"):
                model = build_model(config)
        sharding = Sharding(Config(model=config, parallel="fsdp", precision="fp32"), group)
        sharded = sharding.shard(optimize_for_cpu(model), trained=True).eval()
        copied = sharding.copy(sharded)
        with torch.no_grad():
            torch.testing.assert_close(copied(images), expected, msg=name)
        logits = sharded(images)
        torch.testing.assert_close(logits, expected, msg=name)
        logits.square().sum().backward()
        for (key, parameter), original in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert parameter.grad is not None, (name, key)
            gradient = sharding.gather(parameter.grad)
            assert original.grad is not None
            torch.testing.assert_close(gradient, original.grad, rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


def check_memory(group: ProcessGroup) -> None:
    """Count the bytes that each process holds of a Ti/16 after a step of AdamW."""
    config = preset("Ti/16", num_classes=10, image_size=32)
    sharding = Sharding(Config(model=config, parallel="fsdp", precision="fp32"), group)
    model = sharding.shard(build_model(config), trained=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(example(config)).sum().backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    storages = [local(tensor.detach()).untyped_storage() for tensor in tensors if tensor is not None]
    own = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # gradients may share one
    whole = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert own <= 1.05 * whole / group.size, (own, whole)


def main(task: str, run: str = "") -> None:
    with contextlib.closing(ProcessGroup()) as group:
        if task == "restore":
            check_restored(Path(run), group)
        elif task == "full-disk":
            fail_to_write(Path(run), group)
        else:
            {"families": check_families, "memory": check_memory}[task](group)


if __name__ == "__main__":
    main(*sys.argv[1:])
