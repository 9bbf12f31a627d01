"""Which engines work on this machine, and how fast: each is tested in a subprocess of its own.

Some CPUs advertise instructions that crash, and libraries may be missing or broken: a crash is a result like any other.
Results are cached per CPU and library versions.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..core.io import digest
from ..errors import how_to_install
from .capabilities import cpu_fingerprint
from .engine import ENGINES, Engine
from .engine_cache import toolchain_version
from .machine_cache import load_result, store_result

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoints import Checkpoint

TRIAL_TIMEOUT = 300.0  # seconds per engine
NUM_ROUNDS = 5
BATCH_SIZE = 16
PERMANENT_SIGNALS = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # unlike SIGKILL, which the OOM killer sends
TRIAL_SCRIPT = "import sys; from patchword.engines.engine_trials import trial_main; trial_main(sys.argv[1])"

_results: "dict[str, TrialResult]" = {}  # of this process


@dataclass(frozen=True)
class TrialResult:
    """Result of running an engine with a small ViT.

    Attributes:
        name: The engine.
        works: It ran, and its logits are those of PyTorch.
        reason: Why it does not work.
        signal: The signal that killed the trial, such as SIGILL.
        throughput_batch_1: Images per second at batch size 1.
        throughput_batch_16: Images per second at batch size 16.
    """

    name: str
    works: bool
    reason: str = ""
    signal: str = ""
    throughput_batch_1: float = 0.0
    throughput_batch_16: float = 0.0


def run_trials(
    names: Iterable[str] = tuple(ENGINES), on_progress: Callable[[], object] = lambda: None
) -> dict[str, TrialResult]:
    """Return a result for each engine: cached, or from a trial of about ten seconds."""
    results = {}
    for name in names:
        results[name] = cached_result(name) or run_trial(name)
        on_progress()
    return results


def cached_result(name: str) -> TrialResult | None:
    """Return the result of an earlier trial, by this process or another."""
    return _results.get(name) or load_result(trial_key(name), lambda values: TrialResult(**values))


def trial_key(name: str) -> str:
    """Return the cache key: it changes with the CPU, the number of threads, the code, the versions and the compiler."""
    facts = [cpu_fingerprint(), name, str(os.environ.get("OMP_NUM_THREADS")), toolchain_version()]
    if name == "torch-compiled":
        facts.append(str(shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")))
    return f"trial-{digest(*facts)[:24]}"


def run_trial(name: str, script: str = TRIAL_SCRIPT) -> TrialResult:
    """Test an engine in a subprocess.

    Only reproducible results are stored for other processes: success, and death by one of `PERMANENT_SIGNALS`.
    """
    if missing := ENGINES[name].missing_packages:
        return TrialResult(name, False, f"needs {', '.join(missing)}: {how_to_install('export')}")
    # -P: a file in the working directory must not shadow a library.
    command = [sys.executable, "-P", "-c", script, name]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TRIAL_TIMEOUT)
        result = parse_result(name, process)
        permanent = result.works or result.signal in PERMANENT_SIGNALS
    except subprocess.TimeoutExpired:
        result, permanent = TrialResult(name, False, f"no result within {TRIAL_TIMEOUT:g} seconds"), False
    except OSError as error:
        result, permanent = TrialResult(name, False, f"its trial could not be started ({error.strerror})"), False
    _results[name] = result
    if permanent:
        store_result(trial_key(name), asdict(result))
    return result


def parse_result(name: str, process: "subprocess.CompletedProcess[str]") -> TrialResult:
    """Read the result from the last line of output, or say how the process ended."""
    if process.returncode < 0:
        with contextlib.suppress(ValueError):
            signal_name = signal.Signals(-process.returncode).name
            return TrialResult(name, False, f"its trial was killed by {signal_name}", signal_name)
    lines = process.stdout.strip().splitlines()
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return TrialResult(**json.loads(lines[-1]))
    errors = [line for line in process.stderr.strip().splitlines() if line.strip()]
    reason = errors[-1][:200] if errors else f"its trial ended with exit code {process.returncode}"
    return TrialResult(name, False, reason)


def trial_main(name: str) -> None:
    """Run the trial, in the subprocess: compare with PyTorch on a small ViT, time, print a `TrialResult` as JSON."""
    print(json.dumps(asdict(check_engine(name))))


def check_engine(name: str) -> TrialResult:
    """Compare an engine with PyTorch on a small ViT, and time it."""
    from .engine import open_engine
    from .parity import compute_logits, measure_parity, sample_images

    checkpoint = trial_checkpoint()
    assert checkpoint.preprocess is not None
    images = sample_images(checkpoint.preprocess, BATCH_SIZE)
    engine = open_engine(name, checkpoint, images)
    reference = compute_logits(open_engine("torch", checkpoint, images), images)
    parity = measure_parity(reference, compute_logits(engine, images))
    if not parity.within_tolerance(ENGINES[name].exact):
        return TrialResult(name, False, f"wrong results: a logit differs by {parity.max_abs_diff:.3g}")
    return TrialResult(
        name,
        True,
        throughput_batch_1=measure_throughput(engine, images[:1]),
        throughput_batch_16=measure_throughput(engine, images),
    )


def trial_checkpoint() -> "Checkpoint":
    """Build a ViT of 3 blocks of width 384 with random weights."""
    import torch

    from ..checkpoints import Checkpoint
    from ..config import ViTConfig
    from ..data.preprocess import HALF, Preprocess
    from ..models import build_model

    torch.manual_seed(0)
    config = ViTConfig(embed_dim=384, depth=3, num_heads=6, mlp_dim=1536, num_classes=100)
    model = build_model(config)
    head = model.get_submodule("head")
    assert isinstance(head, torch.nn.Linear)
    torch.nn.init.normal_(head.weight, std=0.1)
    return Checkpoint(config, dict(model.state_dict()), Preprocess(config.image_size, mean=HALF, std=HALF))


def measure_throughput(engine: Engine, images: "Tensor") -> float:
    """Return images per second in the fastest of `NUM_ROUNDS` rounds."""
    engine(images)
    durations = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        engine(images)
        durations.append(time.perf_counter() - start)
    return len(images) / min(durations)
