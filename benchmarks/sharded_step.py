"""One process of a job that makes training steps: time, memory and traffic of each; `scale_training.py` runs it.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python sharded_step.py MODEL PARALLEL IMAGE_SIZE BATCH STEPS

Prints one line of JSON: the growth of peak memory since the model was built, what weights, gradients and optimizer
hold, the median seconds of a step (without the first), and the bytes that this host sent per step.
"""

import contextlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from patchword.config import Config, DataConfig, OptimConfig
from patchword.config.presets import preset
from patchword.data.sources import DatasetSplits, from_arrays
from patchword.training.allocator import retain_freed_memory, return_freed_memory
from patchword.training.distributed import ProcessGroup
from patchword.training.ema import local
from patchword.training.trainer import Trainer


def bytes_sent() -> int:
    """Return how many bytes this host's network interfaces have sent, without the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = {name.strip(): values.split() for name, values in (line.split(":", 1) for line in lines)}
    return sum(int(values[8]) for name, values in fields.items() if name != "lo")


def current_memory() -> float:
    """Return the resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def peak_memory() -> float:
    """Return the largest resident memory so far, in MiB. Not ru_maxrss, which a process inherits from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10


def held_memory(trainer: Trainer) -> float:
    """Return what weights, gradients and optimizer state take in this process, in MiB."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    tensors = [*trainer.model.parameters(), *(t for state in states for t in state.values())]
    gradients = sum(local(p.detach()).nbytes for p in trainer.model.parameters())  # of the same size as the weights
    return (sum(local(t.detach()).nbytes for t in tensors) + gradients) / 2**20


def main(model: str, parallel: str, size: str, batch: str, steps: str) -> None:
    torch.set_num_threads(1)
    pixels = np.random.default_rng(0).integers(0, 256, (int(batch) * 2, int(size), int(size), 3), dtype=np.uint8)
    source = from_arrays(pixels, np.arange(len(pixels)) % 10)
    config = Config(
        model=preset(model, image_size=int(size), num_classes=10),
        data=DataConfig(num_workers=0),
        optim=OptimConfig(lr=1e-5),
        batch_size=int(batch),
        precision="fp32",
        parallel=parallel,  # type: ignore[arg-type]
    )
    with contextlib.closing(ProcessGroup()) as group:
        (return_freed_memory if group.shards(config) else retain_freed_memory)()  # as `Run` does
        before = current_memory()
        trainer = Trainer(config, DatasetSplits(source, source), group, fresh=True)
        trainer.start_loader()
        seconds, sent = [], []
        for step in range(int(steps)):
            group.barrier()
            start, start_bytes = time.perf_counter(), bytes_sent()
            trainer.train_step(step / int(steps))
            group.barrier()
            seconds.append(time.perf_counter() - start)
            sent.append(bytes_sent() - start_bytes)
        result = {
            "peak_growth_mib": peak_memory() - before,
            "held_mib": held_memory(trainer),
            "step_seconds": statistics.median(seconds[1:]),
            "bytes_per_step": statistics.median(sent[1:]),
        }
        trainer.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
