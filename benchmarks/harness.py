"""What every benchmark shares: interleaved rounds, medians, child processes, and JSON with machine and commit."""

import json
import multiprocessing
import os
import platform
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


def interleaved(jobs: dict[str, Callable[[], object]], seconds: float, least: int = 15) -> dict[str, list[float]]:
    """Seconds of each call of each job, for about `seconds` in all and at least `least` rounds.

    Every round calls every job once, so that noise, which comes in stretches of seconds here, hits all alike.
    """
    for job in jobs.values():
        job()  # warm up
    times: dict[str, list[float]] = {name: [] for name in jobs}
    begin, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - begin < seconds:
        for name in list(jobs) if rounds % 2 == 0 else reversed(jobs):
            start = time.perf_counter()
            jobs[name]()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return times


def median_ratio(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast ours is: the median over rounds of the ratio within a round."""
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))


def machine() -> dict[str, Any]:
    """What a figure depends on."""
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
    """TFLOP/s of a large fp32 matrix product: what nothing on this machine can exceed."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = interleaved({"matmul": lambda: a @ b}, seconds=1)["matmul"]
    return 2 * 1024**3 / min(times) / 1e12


@dataclass(frozen=True)
class Failure:
    """What a child sends in place of an answer: its traceback."""

    text: str


class Child:
    """target(*arguments, pipe) in a process of its own. If it fails, so does the benchmark, at once and with its error.

    `target` answers each message that it receives from the pipe with one of its own.
    """

    def __init__(self, name: str, target: Callable[..., object], *arguments: object) -> None:
        context, self.name = multiprocessing.get_context("spawn"), name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=report_failure, args=(target, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()  # else there is no end of file here when the child dies

    def ask(self, message: object) -> Any:
        self.pipe.send(message)
        return self.receive()

    def receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            sys.exit(f"The process of {self.name} died with exit code {self.process.exitcode}.")
        if isinstance(answer, Failure):
            sys.exit(f"{self.name} failed.\n{answer.text}")
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def report_failure(target: Callable[..., object], arguments: tuple[object, ...], pipe: Connection) -> None:
    try:
        target(*arguments, pipe)
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))


def shown(path: str) -> str:
    """The last two parts of a path, which say what it is without saying where."""
    return "/".join(Path(path).parts[-2:])


def commit() -> str:
    """What ran; a dirty tree is marked, since its commit does not say so."""
    root = RESULTS.parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True).stdout
    dirty = any(not line[3:].startswith("results/") for line in changes.splitlines())
    return head + ("-dirty" if dirty else "")


COMMIT = commit()  # at the start: what a benchmark writes into the tree is not what it ran


def write_result(name: str, content: dict[str, Any]) -> Path:
    """results/NAME.json, with the commit, the day and the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {"commit": COMMIT, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    path.write_text(json.dumps({**head, **content}, indent=2) + "\n")
    return path
