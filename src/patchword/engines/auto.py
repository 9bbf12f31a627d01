"""`engine="auto"`: the fastest engine for a model on this machine whose answers stay close to the model's."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.io import digest as digest_of
from ..errors import ConfigError, PatchwordError
from .capabilities import fingerprint
from .engine import ENGINES, Engine, PreparedEngine, first_line, open_engine, prepare
from .engine_cache import digest
from .engine_trials import key, known, try_engines
from .machine_cache import keep, recall
from .parity import Parity, answers, measure_parity, sample_pictures, varied_images
from .timing import time_interleaved

WORTH = 1.05  # times torch's speed: less is not worth the time that opening takes
SHORT_LIST = 2  # engines that are tried with the model itself, and the fastest in fp32
SECONDS = 2.0  # for which each is timed
TIMED = 8  # pictures at a time
SLOW = ("torch-compiled",)  # to open: compiled in every process


@dataclass(frozen=True)
class Choice:
    """An engine, and how far its answers are those of torch in fp32."""

    prepared: PreparedEngine
    engine: Engine
    parity: Parity | None = None  # None: it is torch, or was asked for

    def said(self) -> str:
        name, found = self.prepared.name, self.parity
        if found is None:
            return name
        same = f"on {found.pictures} parts of photographs its class is torch's {found.same:.0%} of the time"
        return (
            f"{name} ({ENGINES[name].means}; {same}, divergence {found.divergence:.2g} nats; --engine torch is exact)"
        )


def select_engine(name: str, checkpoint: Checkpoint, *, quick: bool = False) -> Choice:
    """The engine that a user named, or the fastest; what it cannot do is told at once, and not by the first picture.

    Args:
        quick: only engines that can be opened within a second or two, again and again
    """
    if name == "auto":
        return choose(checkpoint, quick=quick)
    if name in SLOW and quick:
        raise ConfigError(f"The engine {name} would compile the model anew for every process. Choose another, or auto.")
    verdict = known(name) if name in ENGINES else None
    if verdict is not None and not verdict.works:
        raise ConfigError(f"The engine {name} does not work on this machine: {verdict.why}. See patchword doctor.")
    try:
        return opened(name, checkpoint)
    except PatchwordError:
        raise
    except Exception as error:  # whatever a library stumbles on
        raise ConfigError(f"The engine {name} cannot run this model: {first_line(error)}") from error


def choose(checkpoint: Checkpoint, *, quick: bool = False) -> Choice:
    """The fastest of those that agree with torch on photographs.

    Which is fastest is measured once for each architecture and machine; that they agree, once for each model.
    """
    for name in ranking(checkpoint):
        if name == "torch":
            break
        if quick and name in SLOW:
            continue
        choice = tried(name, checkpoint)
        if choice is not None and (found := agreeing(choice, checkpoint)).faithful(ENGINES[name].exact):
            return replace(choice, parity=found)
    return opened("torch", checkpoint)


def agreeing(choice: Choice, checkpoint: Checkpoint) -> Parity:
    """With torch, on other parts of the photographs than those that calibrated it."""
    assert checkpoint.preprocess is not None
    pictures = varied_images(checkpoint.preprocess)
    place = f"agreement-{fingerprint()}-{digest(choice.prepared.name, checkpoint, pictures, ())}"
    found = recall(place, lambda said: Parity(**said))  # type: ignore[arg-type]
    if found is None:
        wanted = answers(open_engine("torch", checkpoint), pictures)
        found = measure_parity(wanted, answers(choice.engine, pictures), checkpoint.multi_label)
        keep(place, vars(found))
    return found


def opened(name: str, checkpoint: Checkpoint) -> Choice:
    """The engine, after its first answer."""
    prepared = prepare(name, checkpoint)
    engine = prepared.opened(checkpoint)
    engine(blank(checkpoint))
    return Choice(prepared, engine)


def tried(name: str, checkpoint: Checkpoint) -> Choice | None:
    """The same, if it can run this model at all."""
    try:
        return opened(name, checkpoint)
    except Exception:  # whatever a library stumbles on: the others remain
        return None


def blank(checkpoint: Checkpoint) -> Tensor:
    assert checkpoint.preprocess is not None
    return torch.zeros(1, *checkpoint.preprocess.size, checkpoint.preprocess.channels, dtype=torch.uint8)


def ranking(checkpoint: Checkpoint) -> list[str]:
    """Names, the fastest first, down to torch."""
    verdicts = try_engines()
    said = [str(checkpoint.config.to_json()), str(torch.get_num_threads())]
    said += [f"{key(name)} {verdict.works}" for name, verdict in verdicts.items()]
    place = f"rank-{digest_of(*said)[:24]}"
    kept = recall(place, lambda names: [str(name) for name in names if name in ENGINES])  # type: ignore[attr-defined]
    if kept:
        return kept
    names = measured(checkpoint)
    keep(place, names)
    return names


def measured(checkpoint: Checkpoint) -> list[str]:
    """The engines that did best in their trials, timed with the model itself in turns."""
    verdicts = [each for each in try_engines().values() if each.works and each.name != "torch"]
    best = sorted(verdicts, key=lambda each: each.single + each.batched, reverse=True)
    exact = [each for each in best if ENGINES[each.name].exact]
    engines = {"torch": open_engine("torch", checkpoint)}
    for name in dict.fromkeys(each.name for each in [*best[:SHORT_LIST], *exact[:1]]):
        if (choice := tried(name, checkpoint)) is not None:
            engines[name] = choice.engine
    assert checkpoint.preprocess is not None
    times = time_interleaved(engines, sample_pictures(checkpoint.preprocess, TIMED), SECONDS)
    names = sorted(engines, key=lambda name: min(times[name]))
    return [n for n in names if n == "torch" or min(times["torch"]) / min(times[n]) >= WORTH]
