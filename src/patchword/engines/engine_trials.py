"""Which engines work on this machine, and how fast: each is tried in a process of its own, which may die of it.

Some processors announce instructions that end a program, and a library may be missing or broken: all of that is an
answer here. Verdicts are kept in the user's cache, by processor and by versions.
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
from .capabilities import fingerprint
from .engine import ENGINES, Engine
from .engine_cache import made_by
from .machine_cache import keep, recall

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 300.0  # seconds for one engine
ROUNDS = 5
LASTING = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # unlike SIGKILL, which want of memory sends
CHILD = "import sys; from patchword.engines.engine_trials import attempt; attempt(sys.argv[1])"


_tried: "dict[str, Verdict]" = {}  # in this process


@dataclass(frozen=True)
class Verdict:
    """What came of trying an engine with a small ViT."""

    name: str
    works: bool
    why: str = ""  # it does not work
    signal: str = ""  # that killed the trial, such as SIGILL
    single: float = 0.0  # pictures a second, one at a time ...
    batched: float = 0.0  # ... and 16 at a time


def try_engines(
    names: Iterable[str] = tuple(ENGINES), on_progress: Callable[[], object] = lambda: None
) -> dict[str, Verdict]:
    """A verdict for each; only what the cache does not know is tried, in some ten seconds each."""
    found = {}
    for name in names:
        found[name] = known(name) or try_engine(name)
        on_progress()
    return found


def known(name: str) -> Verdict | None:
    """What an earlier trial said, in this process or another."""
    return _tried.get(name) or recall(key(name), lambda said: Verdict(**said))  # type: ignore[arg-type]


def key(name: str) -> str:
    """Changes with what a verdict depends on: the processor, its cores in use, code and versions, the compiler."""
    said = [fingerprint(), name, str(os.environ.get("OMP_NUM_THREADS")), made_by()]
    if name == "torch-compiled":
        said.append(str(shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")))
    return f"trial-{digest(*said)[:24]}"


def try_engine(name: str, child: str = CHILD) -> Verdict:
    """Runs the trial. Only what will be the same again is kept beyond this process: success, and death by a signal."""
    if missing := ENGINES[name].missing:
        return Verdict(name, False, f"needs {', '.join(missing)}: {how_to_install('export')}")
    # -P: modules in the current folder are not the libraries.
    command = [sys.executable, "-P", "-c", child, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
        verdict = read(name, done)
        lasting = verdict.works or verdict.signal in LASTING
    except subprocess.TimeoutExpired:
        verdict, lasting = Verdict(name, False, f"no answer within {PATIENCE:g} seconds"), False
    except OSError as error:
        verdict, lasting = Verdict(name, False, f"its trial could not be started ({error.strerror})"), False
    _tried[name] = verdict
    if lasting:
        keep(key(name), asdict(verdict))
    return verdict


def read(name: str, done: "subprocess.CompletedProcess[str]") -> Verdict:
    if done.returncode < 0:
        with contextlib.suppress(ValueError):
            killer = signal.Signals(-done.returncode).name
            return Verdict(name, False, f"its trial was killed by {killer}", killer)
    lines = done.stdout.strip().splitlines()
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return Verdict(**json.loads(lines[-1]))
    said = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return Verdict(name, False, said[-1][:200] if said else f"its trial ended with exit code {done.returncode}")


def attempt(name: str) -> None:
    """In the child: opens the engine for a small ViT, compares its answers with torch's, and times it."""
    import torch

    from ..checkpoints import Checkpoint
    from ..config import ViTConfig
    from ..data.preprocess import HALF, Preprocess
    from ..models import build_model
    from .engine import open_engine
    from .parity import answers, measure_parity, sample_pictures

    torch.manual_seed(0)
    config = ViTConfig(embed_dim=384, depth=3, num_heads=6, mlp_dim=1536, num_classes=100)
    model = build_model(config)
    torch.nn.init.normal_(model.head.weight, std=0.1)  # type: ignore[arg-type]
    checkpoint = Checkpoint(config, dict(model.state_dict()), Preprocess(config.image_size, mean=HALF, std=HALF))
    pictures = sample_pictures(Preprocess(config.image_size, mean=HALF, std=HALF), 16)
    engine = open_engine(name, checkpoint, pictures)
    found = measure_parity(answers(open_engine("torch", checkpoint, pictures), pictures), answers(engine, pictures))
    if not found.faithful(ENGINES[name].exact):
        print(json.dumps(asdict(Verdict(name, False, f"wrong answers: a logit is off by {found.largest:.3g}"))))
        return
    single, batched = speed(engine, pictures[:1]), speed(engine, pictures)
    print(json.dumps(asdict(Verdict(name, True, single=single, batched=batched))))


def speed(engine: Engine, pictures: "Tensor") -> float:
    """Pictures a second, in the best of some rounds."""
    engine(pictures)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        engine(pictures)
        times.append(time.perf_counter() - start)
    return len(pictures) / min(times)
