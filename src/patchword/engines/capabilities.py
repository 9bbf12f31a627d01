"""CPU capabilities, measured in a subprocess: some CPUs advertise bfloat16 and crash when it is used.

Results are cached per CPU model and torch version.
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
from .machine_cache import load_result, store_result

PROBE_TIMEOUT = 120.0  # seconds
# Times matmuls of a size that occurs in a ViT. An illegal instruction kills only the subprocess that runs it.
PROBE_SCRIPT = """
import json, time, torch
def fastest(dtype):
    a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 512).to(dtype)
    times = []
    for _ in range(20):
        start = time.perf_counter(); a @ b; times.append(time.perf_counter() - start)
    return min(times)
print(json.dumps({"speedup": fastest(torch.float32) / fastest(torch.bfloat16)}))
"""


@dataclass(frozen=True)
class Capabilities:
    """What the CPU was measured to do, whatever it advertises.

    Attributes:
        bf16_works: A bfloat16 matmul runs without a crash.
        bf16_speedup: Speed of a bfloat16 matmul relative to float32; 0 if it does not work.
    """

    bf16_works: bool
    bf16_speedup: float


@functools.lru_cache(maxsize=1)
def probe_capabilities() -> Capabilities:
    """Return the capabilities of this CPU: cached, or measured in about two seconds."""
    name = f"bf16-{cpu_fingerprint()}"
    cached = load_result(name, lambda values: Capabilities(**values))
    if cached is not None:
        return cached
    capabilities = run_probe()
    store_result(name, asdict(capabilities))
    return capabilities


def run_probe() -> Capabilities:
    """Run the probe in a subprocess. A crash, a timeout or garbled output means that bf16 does not work."""
    try:
        process = subprocess.run([sys.executable, "-c", PROBE_SCRIPT], capture_output=True, timeout=PROBE_TIMEOUT)
        speedup = float(json.loads(process.stdout)["speedup"]) if process.returncode == 0 else 0.0
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        speedup = 0.0
    return Capabilities(bf16_works=speedup > 0, bf16_speedup=speedup)


def cpu_fingerprint() -> str:
    """Return a digest of what CPU measurements depend on: CPU model, microcode, oneDNN's ISA limit, torch."""
    lines = cpuinfo() or [platform.processor(), platform.machine()]
    facts = [line for line in lines if line.startswith(("model name", "flags", "microcode"))][:3] or lines
    settings = [os.environ.get("ONEDNN_MAX_CPU_ISA", ""), version("torch")]
    return digest(*facts, *settings)[:24]


def installed_versions(packages: Iterable[str]) -> list[str]:
    """List patchword and those of `packages` that are installed, with their versions."""
    installed = []
    for package in ("patchword", *packages):
        with contextlib.suppress(PackageNotFoundError):
            installed.append(f"{package} {version(package)}")
    return installed
