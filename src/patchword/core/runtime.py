"""The process and its machine: threads, signals, and facts about the CPU and the memory.

Facts are what the system says. Nothing is tried here: an instruction that fails ends the process.
"""

import contextlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# CPU flags that decide how fast, and in which precision, a model can run.
FLAGS = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"]
FLAGS += ["asimd", "asimddp", "bf16", "i8mm", "sve"]  # the same on ARM

_CGROUP = Path("/sys/fs/cgroup")


# Threads


def use_threads(count: int) -> None:
    """Set how many threads torch uses for what the calling thread computes."""
    import torch  # not above: the command line starts without it

    torch.get_num_threads()  # a thread's first use takes the process's number, whatever was set before
    torch.set_num_threads(count)


@contextlib.contextmanager
def thread_limit(threads: int | None) -> Iterator[None]:
    """Set how many threads torch uses for what is done within; None leaves it as it is."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Signals


class Stop:
    """Notice SIGTERM and SIGINT instead of dying: `with Stop() as stop:` ... `if stop.signal:` save and leave.

    The second signal is obeyed at once. Outside the main thread, where Python delivers no signals, nothing is noticed.

    Attributes:
        signal: The number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle the first signal: remember it, and give the next one to whoever had it before."""
        self.signal = number
        self.__exit__()

    def __exit__(self, *failure: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}


# Facts


def machine_facts() -> dict[str, Any]:
    """Return what is known of the machine, as plain values, fit for JSON and for a report."""
    import torch

    accelerators = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    accelerators += ["mps"] if torch.backends.mps.is_available() else []
    memory = memory_limit()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "accelerators": accelerators,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def machine_line() -> str:
    """Return the machine in one line, for a page."""
    facts = machine_facts()
    said = [facts["processor"], f"{facts['cores']} cores", *facts["flags"], *facts["accelerators"]]
    return ", ".join([*said, f"{facts['threads']} threads", f"torch {facts['torch']}", f"Python {facts['python']}"])


def cores() -> int:
    """Count the cores that this process may use, not all that the machine has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _first_line(_CGROUP / "cpu.max").partition(" ")
    limit = int(quota) / int(period) if quota.isdigit() and period.isdigit() else allowed
    return max(1, min(allowed, round(limit)))


def memory_limit() -> int | None:
    """Return the bytes of memory that this process may use; None where the system does not say, as on Windows."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _first_line(_CGROUP / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def resident_memory() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    except (OSError, StopIteration, ValueError):
        return 0


def peak_memory() -> int:
    """Return the most bytes of memory that this process has held so far; 0 where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def processor() -> str:
    """Return the name of the CPU."""
    for line in cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def cpu_flags() -> set[str]:
    """Return the instruction sets that the CPU announces: a virtual machine may announce what ends a program."""
    lines = (line.partition(":")[2].split() for line in cpuinfo() if line.startswith(("flags", "Features")))
    return set(next(lines, []))


def cpuinfo() -> list[str]:
    """Return the lines of /proc/cpuinfo; none where there is no such file."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # not Linux


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return ""
