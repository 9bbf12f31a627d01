"""Findings about this machine: processor, memory, threads."""

from ..core.findings import Finding
from ..core.runtime import machine_info

MIN_MEMORY_GIB = 2.0


def machine_findings() -> list[Finding]:
    """Describe the machine, and warn about too many threads or too little memory."""
    info = machine_info()
    memory = f"{info['memory_gib']:.1f} GiB of memory" if info["memory_gib"] else "an unknown amount of memory"
    what = f"{info['processor']}, {info['cores']} cores, {memory}; torch {info['torch']}, {info['threads']} threads."
    findings = [Finding("note", "machine", what, tuple(info["accelerators"]) or ("no accelerator",))]
    flags = ", ".join(info["flags"]) or "none of the known instruction sets"
    advice = "A virtual machine may advertise instructions that crash. So lower precision is first tested "
    findings.append(
        Finding("note", "instruction_sets", f"The processor advertises {flags}.", (), f"{advice}in a subprocess.")
    )
    if info["threads"] > info["cores"]:
        what = f"torch uses {info['threads']} threads on {info['cores']} cores, so they wait for each other."
        advice = f"Set the environment variable OMP_NUM_THREADS={info['cores']}."
        findings.append(Finding("warning", "too_many_threads", what, (), advice))
    if info["memory_gib"] and info["memory_gib"] < MIN_MEMORY_GIB:
        what = f"This machine has only {info['memory_gib']:.1f} GiB of memory."
        advice = "Use a small model and batch_size, and set data.cache_gib to 0."
        findings.append(Finding("warning", "little_memory", what, (), advice))
    return findings
