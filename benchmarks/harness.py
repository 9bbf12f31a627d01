"""Shared by all benchmarks: interleaved rounds, medians, child processes, and JSON with machine and commit."""

import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"


def interleaved(jobs: dict[str, Callable[[], object]], seconds: float, min_rounds: int = 15) -> dict[str, list[float]]:
    """Time every call of every job, for about `seconds` in total and at least `min_rounds` rounds.

    Every round calls every job once, so that noise, which lasts for seconds, affects all jobs alike.
    """
    for job in jobs.values():
        job()  # warm up
    times: dict[str, list[float]] = {name: [] for name in jobs}
    begin, rounds = time.perf_counter(), 0
    while rounds < min_rounds or time.perf_counter() - begin < seconds:
        for name in list(jobs) if rounds % 2 == 0 else reversed(jobs):
            start = time.perf_counter()
            jobs[name]()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return times


def median_ratio(theirs: list[float], ours: list[float]) -> float:
    """Return how many times as fast ours is: the median over rounds of the ratio within a round."""
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def machine() -> dict[str, Any]:
    """Describe the machine and the software that a measurement depends on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def matmul_peak() -> float:
    """Return the TFLOP/s of a large fp32 matmul: the upper limit on this machine."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = interleaved({"matmul": lambda: a @ b}, seconds=1)["matmul"]
    return 2 * 1024**3 / min(times) / 1e12


@dataclass(frozen=True)
class Failure:
    """Sent by a child process that failed: its traceback."""

    text: str


class Child:
    """A child process that runs target(*arguments, pipe). If it fails, the benchmark fails at once with its error.

    `target` replies to each message that it receives from the pipe with one message.
    """

    def __init__(self, name: str, target: Callable[..., object], *arguments: object) -> None:
        context, self.name = multiprocessing.get_context("spawn"), name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=report_failure, args=(target, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()  # otherwise this end never sees an end of file when the child dies

    def ask(self, message: object) -> Any:
        self.pipe.send(message)
        return self.receive()

    def receive(self) -> Any:
        try:
            reply = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            sys.exit(f"The process of {self.name} died with exit code {self.process.exitcode}.")
        if isinstance(reply, Failure):
            sys.exit(f"{self.name} failed.\n{reply.text}")
        return reply

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def report_failure(target: Callable[..., object], arguments: tuple[object, ...], pipe: Connection) -> None:
    try:
        target(*arguments, pipe)
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))


def short_path(path: str) -> str:
    """Return the last two components of a path, so that results do not contain local directories."""
    return "/".join(Path(path).parts[-2:])


def commit() -> str:
    """Return the current commit, with "-dirty" if the tree has uncommitted changes."""
    root = RESULTS.parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True).stdout
    dirty = any(not line[3:].startswith("results/") for line in changes.splitlines())
    return head + ("-dirty" if dirty else "")


COMMIT = commit()  # read at the start, before the benchmark writes files into the tree


def write_result(name: str, content: dict[str, Any]) -> Path:
    """Write results/NAME.json with commit, date and machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(dump_json({**provenance(), **content}) + "\n")
    return path


def provenance() -> dict[str, Any]:
    """Return commit, date and machine of a measurement that is made now."""
    return {"commit": COMMIT, "date": time.strftime("%Y-%m-%d"), "machine": machine()}


def dump_json(content: dict[str, Any]) -> str:
    """Format JSON with indentation, but lists of numbers on one line: matrices would take a line per number."""
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda match: " ".join(match[0].split()), json.dumps(content, indent=2))
