"""Interleaved timing: engines take turns, so that background load affects all of them alike."""

import time

from torch import Tensor

from .engine import Engine

MIN_ROUNDS = 5


def time_interleaved(engines: dict[str, Engine], pixels: Tensor, seconds: float) -> dict[str, list[float]]:
    """Time engines on one batch.

    Every round calls each engine once; every other round goes through them in reverse order.

    Args:
        engines: Engines by name.
        pixels: uint8 (B, H, W, C).
        seconds: Time budget per engine. At least `MIN_ROUNDS` rounds are run.

    Returns:
        The duration of each call in seconds, by engine.
    """
    for engine in engines.values():  # warm up
        engine(pixels)
    durations: dict[str, list[float]] = {name: [] for name in engines}
    deadline, num_rounds = time.perf_counter() + seconds * len(engines), 0
    while time.perf_counter() < deadline or num_rounds < MIN_ROUNDS:
        for name in list(engines) if num_rounds % 2 == 0 else reversed(engines):
            start = time.perf_counter()
            engines[name](pixels)
            durations[name].append(time.perf_counter() - start)
        num_rounds += 1
    return durations
