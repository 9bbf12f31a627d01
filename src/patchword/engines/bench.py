"""Engines side by side: latency, throughput, memory and agreement, in turns, so that noise hits all alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.runtime import resident_memory
from .engine import Engine, first_line, open_engine, prepare
from .parity import Parity, answers, measure_parity
from .timing import time_interleaved

BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Timing:
    """Of one engine at one batch size."""

    batch: int
    median: float  # milliseconds for the batch
    p95: float
    p99: float
    rounds: int

    @property
    def per_second(self) -> float:
        return 1000 * self.batch / self.median


@dataclass(frozen=True)
class EngineBench:
    """An engine on this machine, with this model."""

    name: str
    timings: list[Timing] = field(default_factory=list)
    parity: Parity | None = None
    mebibytes: float = 0.0  # that the process grew by when it was opened and first used
    size: float = 0.0  # mebibytes of what it is opened from
    seconds: float = 0.0  # that opening it and the first answers took
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        said = asdict(self) | {"parity": self.parity and self.parity.to_json()}
        for row, timing in zip(said["timings"], self.timings, strict=True):
            row["per_second"] = timing.per_second
        return said


def bench(
    checkpoint: Checkpoint,
    names: Sequence[str],
    pictures: Tensor,
    seconds: float = 10.0,
    batches: Sequence[int] = BATCHES,
    on_progress: Callable[[], object] = lambda: None,
) -> list[EngineBench]:
    """A row for each engine; `seconds` is about how long each has at each batch size.

    Args:
        pictures: uint8 (N, H, W, C), on which answers are compared
    """
    opened: dict[str, Engine] = {}
    rows: dict[str, dict[str, Any]] = {}
    wanted = answers(open_engine("torch", checkpoint), pictures)
    for name in names:
        rows[name], engine = try_opening(name, checkpoint, pictures, wanted)
        if engine is not None:
            opened[name] = engine
        on_progress()
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for batch in batches:
        copies = pictures.repeat(-(-batch // len(pictures)), 1, 1, 1)[:batch]
        for name, times in time_interleaved(opened, copies, seconds).items():
            median, p95, p99 = (1000 * float(np.quantile(times, q)) for q in (0.5, 0.95, 0.99))
            timings[name].append(Timing(batch, median, p95, p99, len(times)))
        on_progress()
    return [EngineBench(name, timings[name], **rows[name]) for name in names]


def try_opening(
    name: str, checkpoint: Checkpoint, pictures: Tensor, wanted: Tensor
) -> tuple[dict[str, Any], Engine | None]:
    try:
        prepare(name, checkpoint)  # what making the file takes is not counted
        start, before = time.perf_counter(), resident_memory()
        prepared = prepare(name, checkpoint)
        engine = prepared.opened(checkpoint)
        said = answers(engine, pictures)
    except Exception as error:  # whatever a library stumbles on: the others are measured all the same
        return {"error": first_line(error)}, None
    grown, took = (resident_memory() - before) / 2**20, time.perf_counter() - start
    size = len(prepared.file) or sum(t.numel() * t.element_size() for t in checkpoint.tensors.values())
    found = measure_parity(wanted, said, checkpoint.multi_label)
    return {"parity": found, "mebibytes": grown, "size": size / 2**20, "seconds": took}, engine
