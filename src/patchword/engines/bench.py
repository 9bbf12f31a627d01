"""Benchmark of engines side by side: latency, throughput, memory and parity, with interleaved timing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.runtime import resident_memory
from ..core.text import one_line
from .engine import Engine, open_engine, prepare_engine
from .parity import Parity, compute_logits, measure_parity
from .timing import time_interleaved

BATCH_SIZES = (1, 8, 32)


@dataclass(frozen=True)
class Timing:
    """Latency of one engine at one batch size, in milliseconds per batch."""

    batch_size: int
    median_ms: float
    p95_ms: float
    p99_ms: float
    num_rounds: int

    @property
    def images_per_second(self) -> float:
        return 1000 * self.batch_size / self.median_ms


@dataclass(frozen=True)
class EngineBench:
    """Measurements of one engine with one model on this machine.

    Attributes:
        name: The engine.
        timings: One per batch size.
        parity: Agreement with PyTorch in fp32; None if the engine failed.
        memory_mib: Growth of the process when the engine was opened and first used.
        file_mib: Size of the file that the engine loads, or of the weights.
        load_seconds: Time to open the engine and compute the first logits.
        error: Why the engine cannot run this model; empty if it can.
    """

    name: str
    timings: list[Timing] = field(default_factory=list)
    parity: Parity | None = None
    memory_mib: float = 0.0
    file_mib: float = 0.0
    load_seconds: float = 0.0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the throughput of each timing."""
        document = asdict(self) | {"parity": self.parity and self.parity.to_json()}
        for row, timing in zip(document["timings"], self.timings, strict=True):
            row["images_per_second"] = timing.images_per_second
        return document


def bench_engines(
    checkpoint: Checkpoint,
    names: Sequence[str],
    images: Tensor,
    seconds: float = 10.0,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    on_progress: Callable[[], object] = lambda: None,
) -> list[EngineBench]:
    """Measure engines with a model.

    Args:
        checkpoint: The model.
        names: Engines to measure.
        images: uint8 (N, H, W, C), on which logits are compared.
        seconds: Approximate time per engine and batch size.
        batch_sizes: Batch sizes to time.
        on_progress: Called after each engine is opened and after each batch size.
    """
    engines: dict[str, Engine] = {}
    rows: dict[str, EngineBench] = {}
    reference = compute_logits(open_engine("torch", checkpoint), images)
    for name in names:
        rows[name], engine = open_and_compare(name, checkpoint, images, reference)
        if engine is not None:
            engines[name] = engine
        on_progress()
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for batch_size in batch_sizes:
        batch = images.repeat(-(-batch_size // len(images)), 1, 1, 1)[:batch_size]
        for name, durations in time_interleaved(engines, batch, seconds).items():
            median, p95, p99 = (1000 * float(np.quantile(durations, q)) for q in (0.5, 0.95, 0.99))
            timings[name].append(Timing(batch_size, median, p95, p99, len(durations)))
        on_progress()
    return [replace(rows[name], timings=timings[name]) for name in names]


def open_and_compare(
    name: str, checkpoint: Checkpoint, images: Tensor, reference: Tensor
) -> tuple[EngineBench, Engine | None]:
    """Open an engine and compare its logits with the reference; an engine that fails has an error instead."""
    try:
        prepare_engine(name, checkpoint)  # builds the file, which is not part of the load time
        start, memory = time.perf_counter(), resident_memory()
        prepared = prepare_engine(name, checkpoint)
        engine = prepared.open(checkpoint)
        logits = compute_logits(engine, images)
    except Exception as error:  # any failure of a library: the other engines are still measured
        return EngineBench(name, error=one_line(error, 300)), None
    growth, load_seconds = resident_memory() - memory, time.perf_counter() - start
    size = len(prepared.file) or sum(t.numel() * t.element_size() for t in checkpoint.tensors.values())
    parity = measure_parity(reference, logits, checkpoint.multi_label)
    row = EngineBench(name, parity=parity, memory_mib=growth / 2**20, file_mib=size / 2**20, load_seconds=load_seconds)
    return row, engine
