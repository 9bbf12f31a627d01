"""`engine="auto"`: the fastest engine for a model on this machine whose answers are the model's."""

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..data.cache import cache_folder
from ..errors import PatchwordError
from .agreement import Agreement, agreement, answers, sample_pictures
from .engine import ENGINES, Engine, open_engine
from .probe import fingerprint
from .trial import try_engines

WORTH = 1.05  # times torch's speed: less is not worth the time that opening takes
SHORT_LIST = 3  # engines that are tried with the model itself
SECONDS = 2.0  # for which each is timed


@dataclass(frozen=True)
class Choice:
    """An engine, and how far its answers are those of torch in fp32."""

    name: str
    engine: Engine
    agreement: Agreement | None = None  # None: it is torch


def choose(checkpoint: Checkpoint, pictures: Tensor | None = None) -> Choice:
    """The fastest of those that agree with torch on `pictures` (uint8 (N, H, W, C); some photographs by default).

    Which is fastest is measured once for each architecture and machine; that they agree is checked every time.
    """
    assert checkpoint.preprocess is not None
    pictures = sample_pictures(checkpoint.preprocess) if pictures is None else pictures
    plain = open_engine("torch", checkpoint, pictures)
    wanted = answers(plain, pictures)
    for name in ranking(checkpoint, pictures):
        if name == "torch":
            break
        with contextlib.suppress(PatchwordError, RuntimeError, ValueError):  # a library's own, for this model only
            engine = open_engine(name, checkpoint, pictures)
            found = agreement(wanted, answers(engine, pictures))
            if found.faithful(ENGINES[name].exact):
                return Choice(name, engine, found)
    return Choice("torch", plain)


def ranking(checkpoint: Checkpoint, pictures: Tensor) -> list[str]:
    """Names, the fastest first, down to torch."""
    said = f"{checkpoint.config.to_json()} {torch.get_num_threads()} {version('patchword')} {fingerprint()}"
    packages = "".join(f" {name} {verdict.works}" for name, verdict in try_engines().items())
    path = cache_folder() / "engines" / f"rank-{hashlib.sha256((said + packages).encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        names = json.loads(path.read_text())
        if isinstance(names, list) and set(names) <= set(ENGINES):
            return names
    names = measured(checkpoint, pictures)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(names))
        os.replace(part, path)
    return names


def measured(checkpoint: Checkpoint, pictures: Tensor) -> list[str]:
    """The engines that did best in their trials, timed with the model itself in turns."""
    verdicts = [each for each in try_engines().values() if each.works and each.name != "torch"]
    best = sorted(verdicts, key=lambda each: each.single + each.batched, reverse=True)[:SHORT_LIST]
    engines = {"torch": open_engine("torch", checkpoint, pictures)}
    for each in best:
        with contextlib.suppress(PatchwordError, RuntimeError, ValueError):
            engines[each.name] = open_engine(each.name, checkpoint, pictures)
    batch = pictures[:8]
    times: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine(batch)
    end = time.perf_counter() + SECONDS * len(engines)
    while time.perf_counter() < end or len(times["torch"]) < 3:
        for name, engine in engines.items():
            start = time.perf_counter()
            engine(batch)
            times[name].append(time.perf_counter() - start)
    names = sorted(engines, key=lambda name: min(times[name]))
    return [n for n in names if n == "torch" or min(times["torch"]) / min(times[n]) >= WORTH]
