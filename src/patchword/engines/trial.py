"""Which engines work on this machine, and how fast: each is tried in a process of its own, which may die of it.

Some processors announce instructions that end a program, and a library may be missing or broken: all of that is an
answer here. Verdicts are kept in the user's cache, by processor and by versions.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.cache import cache_folder
from .engine import ENGINES, Engine
from .probe import fingerprint

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 300.0  # seconds for one engine
ROUNDS = 5
CHILD = "import sys; from patchword.engines.trial import attempt; attempt(sys.argv[1])"


@dataclass(frozen=True)
class Verdict:
    """What came of trying an engine with a small ViT."""

    name: str
    works: bool
    why: str = ""  # it does not work
    single: float = 0.0  # pictures a second, one at a time ...
    batched: float = 0.0  # ... and 16 at a time


def try_engines(
    names: Iterable[str] = tuple(ENGINES), on_progress: Callable[[], object] = lambda: None
) -> dict[str, Verdict]:
    """A verdict for each; only what the cache does not know is tried (up to a minute for each)."""
    found = {}
    for name in names:
        found[name] = recall(name) or try_engine(name)
        on_progress()
    return found


def recall(name: str) -> Verdict | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(place(name).read_text()))
    return None


def place(name: str) -> Path:
    """Where a verdict is kept: it depends on the processor, and on the versions of what was tried."""
    versions = []
    for package in ("patchword", *ENGINES[name].needs):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    digest = hashlib.sha256("\n".join([fingerprint(), name, *versions]).encode()).hexdigest()[:24]
    return cache_folder() / "engines" / f"{digest}.json"


def try_engine(name: str, child: str = CHILD) -> Verdict:
    """Runs the trial; what it says is kept, unless it only ran out of time."""
    if missing := ENGINES[name].missing:
        return Verdict(name, False, f"needs {', '.join(missing)}: pip install 'patchword[export]'")
    try:
        done = subprocess.run([sys.executable, "-c", child, name], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return Verdict(name, False, f"no answer within {PATIENCE:g} seconds")
    verdict = read(name, done)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not the answer
        path = place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(verdict)))
        os.replace(part, path)
    return verdict


def read(name: str, done: "subprocess.CompletedProcess[str]") -> Verdict:
    if done.returncode < 0:
        with contextlib.suppress(ValueError):
            return Verdict(name, False, f"its trial was killed by {signal.Signals(-done.returncode).name}")
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
    from ..models import build
    from ..preprocess import HALF, Preprocess
    from .agreement import agreement, answers, sample_pictures
    from .engine import open_engine

    torch.manual_seed(0)
    config = ViTConfig(embed_dim=384, depth=3, num_heads=6, mlp_dim=1536, num_classes=100)
    model = build(config)
    torch.nn.init.normal_(model.head.weight, std=0.1)  # type: ignore[arg-type]
    checkpoint = Checkpoint(config, dict(model.state_dict()), Preprocess(config.image_size, mean=HALF, std=HALF))
    pictures = sample_pictures(Preprocess(config.image_size, mean=HALF, std=HALF), 16)
    engine = open_engine(name, checkpoint, pictures)
    found = agreement(answers(open_engine("torch", checkpoint, pictures), pictures), answers(engine, pictures))
    if not found.faithful(ENGINES[name].exact):
        print(json.dumps(asdict(Verdict(name, False, f"wrong answers: a logit is off by {found.largest:.3g}"))))
        return
    single, batched = speed(engine, pictures[:1]), speed(engine, pictures)
    print(json.dumps(asdict(Verdict(name, True, "", single, batched))))


def speed(engine: Engine, pictures: "Tensor") -> float:
    """Pictures a second, in the best of some rounds."""
    engine(pictures)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        engine(pictures)
        times.append(time.perf_counter() - start)
    return len(pictures) / min(times)
