"""The machine: what it announces. Nothing is tried here, since an instruction that fails ends the process."""

import os
import platform
from pathlib import Path
from typing import Any

from .finding import Finding

# Processor flags that decide how fast, and in which precision, a model can run.
FLAGS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8".split()
FLAGS += "asimd asimddp bf16 i8mm sve".split()  # the like on ARM
LITTLE = 2.0  # GiB

_CGROUP = Path("/sys/fs/cgroup")


def machine_facts() -> dict[str, Any]:
    """Plain values, fit for JSON and for a report."""
    import torch

    accelerators = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    accelerators += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "memory_gib": memory(),
        "flags": [flag for flag in FLAGS if flag in announced()],
        "accelerators": accelerators,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def machine_line() -> str:
    """The machine in a line, for a page."""
    facts = machine_facts()
    said = [facts["processor"], f"{facts['cores']} cores", *facts["flags"], *facts["accelerators"]]
    return ", ".join([*said, f"{facts['threads']} threads", f"torch {facts['torch']}", f"Python {facts['python']}"])


def machine_findings() -> list[Finding]:
    facts = machine_facts()
    memory = f"{facts['memory_gib']:.1f} GiB of memory" if facts["memory_gib"] else "an unknown amount of memory"
    what = (
        f"{facts['processor']}, {facts['cores']} cores, {memory}; torch {facts['torch']}, {facts['threads']} threads."
    )
    findings = [Finding("note", what, tuple(facts["accelerators"]) or ("no accelerator",))]
    flags = ", ".join(facts["flags"]) or "nothing that we know"
    advice = "These are announcements: a virtual machine may announce what ends a program. Lower precision is tried "
    findings.append(Finding("note", f"The processor announces {flags}.", (), f"{advice}in a process of its own first."))
    if facts["threads"] > facts["cores"]:
        what = f"torch uses {facts['threads']} threads on {facts['cores']} cores, which then wait for each other."
        findings.append(Finding("warning", what, (), f"Set the environment variable OMP_NUM_THREADS={facts['cores']}."))
    if facts["memory_gib"] and facts["memory_gib"] < LITTLE:
        what = f"There are only {facts['memory_gib']:.1f} GiB of memory."
        findings.append(Finding("warning", what, (), "Use a small model and batch_size, and set data.memory to 0."))
    return findings


def cores() -> int:
    """Those that this process may use, not all that the machine has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = first_line(_CGROUP / "cpu.max").partition(" ")
    limit = int(quota) / int(period) if quota.isdigit() and period.isdigit() else allowed
    return max(1, min(allowed, round(limit)))


def memory() -> float | None:
    """GiB that this process may use."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = first_line(_CGROUP / "memory.max")
    return round(min(total, int(limit) if limit.isdigit() else total) / 2**30, 1)


def processor() -> str:
    for line in cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def announced() -> set[str]:
    lines = (line.partition(":")[2].split() for line in cpuinfo() if line.startswith(("flags", "Features")))
    return set(next(lines, []))


def cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []  # not Linux


def first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""
