"""`engine="auto"`: the fastest engine on this machine whose predictions stay close to the model's."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.io import digest
from ..core.text import one_line
from ..errors import ConfigError, PatchwordError
from .capabilities import cpu_fingerprint
from .engine import ENGINES, Engine, PreparedEngine, open_engine, prepare_engine
from .engine_cache import cache_key
from .engine_trials import cached_result, run_trials, trial_key
from .machine_cache import load_result, store_result
from .parity import Parity, compute_logits, held_out_images, measure_parity, sample_images
from .timing import time_interleaved

MIN_SPEEDUP = 1.05  # over torch: a smaller one does not pay for the time to open the engine
NUM_CANDIDATES = 2  # engines that are timed with the model itself, besides the fastest in fp32
TIMING_SECONDS = 2.0  # per engine
TIMING_BATCH_SIZE = 8
SLOW_TO_OPEN = ("torch-compiled",)  # compiles in every process


@dataclass(frozen=True)
class SelectedEngine:
    """An open engine.

    Attributes:
        prepared: Opens the same engine in another process.
        engine: The engine.
        parity: Agreement with PyTorch in fp32; None if the engine is torch or was requested by name.
    """

    prepared: PreparedEngine
    engine: Engine
    parity: Parity | None = None

    def describe(self) -> str:
        """Return the name, and how close its predictions are to PyTorch's if it was selected automatically."""
        name, parity = self.prepared.name, self.parity
        if parity is None:
            return name
        agreement = f"same top-1 class as torch on {parity.top1_agreement:.0%} of {parity.num_images} sample images"
        return (
            f"{name} ({ENGINES[name].description}; {agreement}, KL divergence {parity.kl_divergence:.2g} nats; "
            "use --engine torch for exact results)"
        )


def select_engine(name: str, checkpoint: Checkpoint, *, quick: bool = False) -> SelectedEngine:
    """Open the engine `name`, or the fastest suitable one if it is "auto".

    Args:
        name: Key in `ENGINES`, or "auto".
        checkpoint: The model.
        quick: Accept only engines that open within a second or two in every process.

    Raises:
        ConfigError: The engine does not exist, does not work on this machine, or cannot run this model.
    """
    if name == "auto":
        return select_fastest(checkpoint, quick=quick)
    if name in SLOW_TO_OPEN and quick:
        raise ConfigError(f"The engine {name} would compile the model again in every process. Use another, or auto.")
    result = cached_result(name) if name in ENGINES else None
    if result is not None and not result.works:
        raise ConfigError(f"The engine {name} does not work on this machine: {result.reason}. See patchword doctor.")
    try:
        return open_and_run(name, checkpoint)
    except PatchwordError:
        raise
    except Exception as error:  # any failure of a library
        raise ConfigError(f"The engine {name} cannot run this model: {one_line(error, 300)}") from error


def select_fastest(checkpoint: Checkpoint, *, quick: bool = False) -> SelectedEngine:
    """Open the fastest engine that agrees with PyTorch on photographs.

    Speed is measured once per architecture and machine, parity once per model.
    """
    for name in rank_engines(checkpoint):
        if name == "torch":
            break
        if quick and name in SLOW_TO_OPEN:
            continue
        selected = try_open(name, checkpoint)
        if selected is None:
            continue
        parity = measure_cached_parity(selected, checkpoint)
        if parity.within_tolerance(ENGINES[name].exact):
            return replace(selected, parity=parity)
    return open_and_run("torch", checkpoint)


def measure_cached_parity(selected: SelectedEngine, checkpoint: Checkpoint) -> Parity:
    """Compare an engine with PyTorch, on other images than those that calibrated it; results are cached."""
    assert checkpoint.preprocess is not None
    images = held_out_images(checkpoint.preprocess)
    key = f"parity-{cpu_fingerprint()}-{cache_key(selected.prepared.name, checkpoint, images, ())}"
    parity = load_result(key, lambda values: Parity(**values))
    if parity is None:
        reference = compute_logits(open_engine("torch", checkpoint), images)
        parity = measure_parity(reference, compute_logits(selected.engine, images), checkpoint.multi_label)
        store_result(key, vars(parity))
    return parity


def open_and_run(name: str, checkpoint: Checkpoint) -> SelectedEngine:
    """Open an engine and run it once, so that it fails now or never."""
    prepared = prepare_engine(name, checkpoint)
    engine = prepared.open(checkpoint)
    engine(blank_image(checkpoint))
    return SelectedEngine(prepared, engine)


def try_open(name: str, checkpoint: Checkpoint) -> SelectedEngine | None:
    """Open an engine; None if it cannot run this model."""
    try:
        return open_and_run(name, checkpoint)
    except Exception:  # any failure of a library: other engines remain
        return None


def blank_image(checkpoint: Checkpoint) -> Tensor:
    """Return a black image, uint8 (1, H, W, C)."""
    assert checkpoint.preprocess is not None
    return torch.zeros(1, *checkpoint.preprocess.size, checkpoint.preprocess.channels, dtype=torch.uint8)


def rank_engines(checkpoint: Checkpoint) -> list[str]:
    """Return engines by speed with this architecture, fastest first, down to torch; results are cached."""
    facts = [str(checkpoint.config.to_json()), str(torch.get_num_threads())]
    facts += [f"{trial_key(name)} {result.works}" for name, result in run_trials().items()]
    key = f"rank-{digest(*facts)[:24]}"
    ranking = load_result(key, lambda names: [str(name) for name in names if name in ENGINES])
    if ranking:
        return ranking
    ranking = measure_ranking(checkpoint)
    store_result(key, ranking)
    return ranking


def measure_ranking(checkpoint: Checkpoint) -> list[str]:
    """Time the engines that were fastest in their trials with the model itself."""
    working = [result for result in run_trials().values() if result.works and result.name != "torch"]
    working.sort(key=lambda result: result.throughput_batch_1 + result.throughput_batch_16, reverse=True)
    exact = [result for result in working if ENGINES[result.name].exact]
    engines = {"torch": open_engine("torch", checkpoint)}
    for name in dict.fromkeys(result.name for result in [*working[:NUM_CANDIDATES], *exact[:1]]):
        if (selected := try_open(name, checkpoint)) is not None:
            engines[name] = selected.engine
    assert checkpoint.preprocess is not None
    durations = time_interleaved(engines, sample_images(checkpoint.preprocess, TIMING_BATCH_SIZE), TIMING_SECONDS)
    fastest = {name: min(values) for name, values in durations.items()}
    ranking = sorted(engines, key=lambda name: fastest[name])
    return [n for n in ranking if n == "torch" or fastest["torch"] / fastest[n] >= MIN_SPEEDUP]
