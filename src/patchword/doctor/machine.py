"""What to know, and to change, about the machine."""

from ..core.findings import Finding
from ..core.runtime import machine_info

LITTLE = 2.0  # GiB


def machine_findings() -> list[Finding]:
    facts = machine_info()
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
        findings.append(Finding("warning", what, (), "Use a small model and batch_size, and set data.cache_gib to 0."))
    return findings
