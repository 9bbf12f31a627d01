"""What this machine really does, found out in a child process: some processors announce bfloat16 and die of it.

The answer is kept in the user's cache, one file for each kind of processor and version of torch.
"""

import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from ..core.io import digest
from ..core.runtime import cpuinfo
from .machine_cache import keep, recall

# Times products of a size that a ViT has; run by a child, which may be killed by its first instruction.
CHILD = """
import json, time, torch
def best(dtype):
    a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 512).to(dtype)
    times = []
    for _ in range(20):
        start = time.perf_counter(); a @ b; times.append(time.perf_counter() - start)
    return min(times)
print(json.dumps({"gain": best(torch.float32) / best(torch.bfloat16)}))
"""


@dataclass(frozen=True)
class Capabilities:
    """Verdicts, not announcements."""

    bf16_works: bool
    bf16_gain: float  # speed of a bf16 product in terms of an fp32 one; 0 where it dies


@functools.lru_cache(maxsize=1)
def probe_capabilities() -> Capabilities:
    """Asks the cache, or else a child process (some two seconds, once for each machine)."""
    name = f"bf16-{fingerprint()}"
    known = recall(name, lambda said: Capabilities(**said))  # type: ignore[arg-type]
    if known is not None:
        return known
    abilities = measure()
    keep(name, asdict(abilities))
    return abilities


def measure() -> Capabilities:
    try:
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, timeout=120)
        gain = float(json.loads(done.stdout)["gain"]) if done.returncode == 0 else 0.0
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        gain = 0.0
    return Capabilities(bf16_works=gain > 0, bf16_gain=gain)


def fingerprint() -> str:
    """Of what the verdict depends on."""
    lines = cpuinfo() or [platform.processor(), platform.machine()]
    said = [line for line in lines if line.startswith(("model name", "flags", "microcode"))][:3] or lines
    settings = [os.environ.get("ONEDNN_MAX_CPU_ISA", ""), version("torch")]
    return digest(*said, *settings)[:24]


def versions(packages: Iterable[str]) -> list[str]:
    found = []
    for package in ("patchword", *packages):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found
