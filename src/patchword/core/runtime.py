"""The process and its machine: threads, signals, CPU and memory.

Hardware information is what the operating system reports. Nothing is executed to verify it, because an instruction
that the CPU does not support ends the process; `engines/capabilities.py` tests instructions in a subprocess.
"""

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

# CPU flags that decide how fast, and in which precision, a model can run.
CPU_FLAGS = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"]
CPU_FLAGS += ["asimd", "asimddp", "bf16", "i8mm", "sve"]  # ARM

_CGROUP = Path("/sys/fs/cgroup")


# Threads


def set_num_threads(count: int) -> None:
    """Set how many threads torch uses for the operations of the calling thread."""
    import torch  # imported here: the command line starts without it

    torch.get_num_threads()  # the first call in a thread resets its number to that of the process
    torch.set_num_threads(count)


@contextlib.contextmanager
def limit_threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of torch threads inside a `with` block; None leaves it unchanged."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Signals


class StopSignal:
    """Catch SIGTERM and SIGINT, so that a run can save its state: `with StopSignal() as stop: ... if stop.signal: ...`.

    Only the first signal is caught; the second one has its usual effect. Python delivers signals to the main thread
    only, so in other threads nothing is caught.

    Attributes:
        signal: The number of the signal that was received, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal and restore the previous handlers."""
        self.signal = number
        self.__exit__()

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


# Hardware


class MachineInfo(TypedDict):
    """The machine and the versions that matter for performance, as JSON-compatible values."""

    system: str
    processor: str
    cores: int
    memory_gib: float | None
    flags: list[str]
    accelerators: list[str]
    python: str
    torch: str
    threads: int


def machine_info() -> MachineInfo:
    """Describe the machine, for JSON output and reports."""
    import torch

    accelerators = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    accelerators += ["mps"] if torch.backends.mps.is_available() else []
    memory, supported = memory_limit(), cpu_flags()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpu_name(),
        "cores": available_cores(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "flags": [flag for flag in CPU_FLAGS if flag in supported],
        "accelerators": accelerators,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def machine_summary() -> str:
    """Describe the machine in one line, for a report."""
    info = machine_info()
    hardware = [info["processor"], f"{info['cores']} cores", *info["flags"], *info["accelerators"]]
    software = [f"{info['threads']} threads", f"torch {info['torch']}", f"Python {info['python']}"]
    return ", ".join([*hardware, *software])


def available_cores() -> int:
    """Count the cores that this process may use, given its CPU affinity and cgroup quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _first_line(_CGROUP / "cpu.max").partition(" ")
    limit = int(quota) / int(period) if quota.isdigit() and period.isdigit() else allowed
    return max(1, min(allowed, round(limit)))


def memory_limit() -> int | None:
    """Return the bytes of memory that this process may use; None where the system does not report it (Windows)."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _first_line(_CGROUP / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration, ValueError):
        return 0


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_name() -> str:
    """Return the model name of the CPU."""
    for line in cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def cpu_flags() -> set[str]:
    """Return the instruction sets that the CPU reports; a virtual machine may report some that crash."""
    lines = (line.partition(":")[2].split() for line in cpuinfo() if line.startswith(("flags", "Features")))
    return set(next(lines, []))


def busy_cores(seconds: float = 0.2) -> float:
    """Measure how many cores are busy while this process waits; 0 where the system does not tell."""
    before = _cpu_times()
    time.sleep(seconds)
    spent = [after - earlier for after, earlier in zip(_cpu_times(), before, strict=True)]
    total, idle = sum(spent), sum(spent[3:5])  # idle and waiting for the disk
    return (os.cpu_count() or 1) * (1 - idle / total) if total > 0 else 0.0


def _cpu_times() -> list[int]:
    """Return the time that all cores spent in each state: user, nice, system, idle, iowait, ..."""
    return [int(ticks) for ticks in _first_line(Path("/proc/stat")).split()[1:]]


def cpuinfo() -> list[str]:
    """Return the lines of /proc/cpuinfo; an empty list where it does not exist (macOS, Windows)."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return ""
