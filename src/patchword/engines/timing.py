"""Engines timed in turns, so that noise, which comes in stretches, hits all alike."""

import time

from torch import Tensor

from .engine import Engine

LEAST = 5  # rounds


def time_interleaved(engines: dict[str, Engine], pixels: Tensor, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call; every round calls every engine once, the next in reverse."""
    for engine in engines.values():
        engine(pixels)
    times: dict[str, list[float]] = {name: [] for name in engines}
    end, rounds = time.perf_counter() + seconds * len(engines), 0
    while time.perf_counter() < end or rounds < LEAST:
        for name in list(engines) if rounds % 2 == 0 else reversed(engines):
            start = time.perf_counter()
            engines[name](pixels)
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return times
