"""`engine="auto"`: the fastest engine for a model on this machine whose answers stay close to the model's."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..errors import ConfigError, PatchwordError
from .agreement import Agreement, agreement, answers, other_pictures, sample_pictures
from .engine import ENGINES, Engine, Prepared, first_line, open_engine, prepare
from .files import digest
from .kept import keep, recall
from .trial import key, known, try_engines
from .turns import in_turns

WORTH = 1.05  # times torch's speed: less is not worth the time that opening takes
SHORT_LIST = 2  # engines that are tried with the model itself, and the fastest in fp32
SECONDS = 2.0  # for which each is timed
TIMED = 8  # pictures at a time


@dataclass(frozen=True)
class Choice:
    """An engine, and how far its answers are those of torch in fp32."""

    name: str
    engine: Engine
    agreement: Agreement | None = None  # None: it is torch

    def said(self) -> str:
        if self.agreement is None:
            return self.name
        return f"{self.name} (the class is torch's for {self.agreement.same:.0%} of {self.agreement.pictures} pictures)"


def choose(checkpoint: Checkpoint) -> Choice:
    """The fastest of those that agree with torch on photographs.

    Which is fastest is measured once for each architecture and machine; that they agree, once for each model.
    """
    for name in ranking(checkpoint):
        if name == "torch":
            break
        engine = tried(name, checkpoint)
        if engine is not None and (found := agreeing(name, engine, checkpoint)).faithful(ENGINES[name].exact):
            return Choice(name, engine, found)
    return Choice("torch", open_engine("torch", checkpoint))


def agreeing(name: str, engine: Engine, checkpoint: Checkpoint) -> Agreement:
    """With torch, on photographs that had no part in calibration."""
    assert checkpoint.preprocess is not None
    pictures = other_pictures(checkpoint.preprocess)
    place = f"agreement-{digest(name, checkpoint, pictures, ())}"
    found = recall(place, lambda said: Agreement(**said))  # type: ignore[arg-type]
    if found is None:
        wanted = answers(open_engine("torch", checkpoint), pictures)
        found = agreement(wanted, answers(engine, pictures), checkpoint.several)
        keep(place, vars(found))
    return found


def prepare_asked(name: str, checkpoint: Checkpoint) -> Prepared:
    """What a user named, or the fastest, to be opened in another process."""
    if name == "auto":
        name = choose(checkpoint).name
    elif name != "torch":
        open_asked(name, checkpoint)  # what it cannot do is told here
    return prepare(name, checkpoint)


def open_asked(name: str, checkpoint: Checkpoint) -> Engine:
    """The engine that a user named; what it cannot do is told at once, and not by the first picture."""
    verdict = known(name) if name in ENGINES else None
    if verdict is not None and not verdict.works:
        raise ConfigError(f"The engine {name} does not work on this machine: {verdict.why}. See patchword doctor.")
    try:
        engine = open_engine(name, checkpoint)
        engine(blank(checkpoint))
    except PatchwordError:
        raise
    except Exception as error:  # whatever a library stumbles on
        raise ConfigError(f"The engine {name} cannot run this model: {first_line(error)}") from error
    return engine


def tried(name: str, checkpoint: Checkpoint) -> Engine | None:
    """The engine, if it can run this model at all."""
    try:
        engine = open_engine(name, checkpoint)
        engine(blank(checkpoint))
    except Exception:  # whatever a library stumbles on: the others remain
        return None
    return engine


def blank(checkpoint: Checkpoint) -> Tensor:
    assert checkpoint.preprocess is not None
    return torch.zeros(1, *checkpoint.preprocess.size, checkpoint.preprocess.channels, dtype=torch.uint8)


def ranking(checkpoint: Checkpoint) -> list[str]:
    """Names, the fastest first, down to torch."""
    verdicts = try_engines()
    said = [str(checkpoint.config.to_json()), str(torch.get_num_threads())]
    said += [f"{key(name)} {verdict.works}" for name, verdict in verdicts.items()]
    place = f"rank-{hashlib.sha256(' '.join(said).encode()).hexdigest()[:24]}"
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
        if (engine := tried(name, checkpoint)) is not None:
            engines[name] = engine
    assert checkpoint.preprocess is not None
    times = in_turns(engines, sample_pictures(checkpoint.preprocess, TIMED), SECONDS)
    names = sorted(engines, key=lambda name: min(times[name]))
    return [n for n in names if n == "torch" or min(times["torch"]) / min(times[n]) >= WORTH]
