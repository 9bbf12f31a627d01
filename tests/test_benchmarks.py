"""A benchmark whose child process fails ends with the child's error instead of waiting forever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.serving import TIMEOUT

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CHILD = """
import os
from harness import Child

def echo(fault, pipe):
    if fault == "start":
        raise ValueError("no such model")
    pipe.send("ready")
    while (message := pipe.recv()) != "die":
        if message == "fail":
            raise ValueError("no such step")
        pipe.send(message)
    os._exit(7)

if __name__ == "__main__":
    child = Child("echo", echo, "FAULT")
    assert child.receive() == "ready"
    assert [child.ask(n) for n in (1, 2)] == [1, 2]
    child.ask("FAULT")
"""
LIBRARY = """
from training_speed import SHAPES, measure

if __name__ == "__main__":
    measure("small", SHAPES["6x128/4 at 32, batch 256"], ["vit-pytorch"], 0.0)
"""
THREAD = """
from training_speed import SHAPES, measure
from transformers import Trainer

def fail(*arguments, **options):
    raise RuntimeError("out of memory")

Trainer.training_step = fail  # also in the child, which imports this file

if __name__ == "__main__":
    measure("small", SHAPES["6x128/4 at 32, batch 256"], ["transformers"], 0.0)
"""
SERVER = """
from serve_load import RunningServer

RunningServer("there/is/no/model")
"""


def run_failing(code: str, folder: Path, *packages: Path) -> str:
    """Run a benchmark with this code, which must fail, and return its standard error."""
    (folder / "benchmark.py").write_text(code)
    path = os.pathsep.join([*map(str, packages), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "benchmark.py"], {**os.environ, "PYTHONPATH": path}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert process.returncode == 1, process.stderr
    return process.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("start", "ValueError: no such model"),
        ("fail", "ValueError: no such step"),
        ("die", "The process of echo died with exit code 7"),
    ],
)
def test_failing_child(fault: str, message: str, tmp_path: Path) -> None:
    assert message in run_failing(CHILD.replace("FAULT", fault), tmp_path)


@pytest.mark.slow
def test_missing_library(tmp_path: Path) -> None:
    package = tmp_path / "packages/vit_pytorch"  # takes precedence over the real one
    package.mkdir(parents=True)
    for file in ("__init__.py", "vit.py"):
        (package / file).write_text("raise ImportError('vit-pytorch is incomplete')")
    message = run_failing(LIBRARY, tmp_path, package.parent)
    assert "vit-pytorch failed." in message
    assert "ImportError: vit-pytorch is incomplete" in message


@pytest.mark.slow
def test_failing_trainer_thread(tmp_path: Path) -> None:
    """Transformers' Trainer runs in a thread of the child, which the child waits for."""
    message = run_failing(THREAD, tmp_path)
    assert "transformers failed." in message
    assert "RuntimeError: out of memory" in message


@pytest.mark.slow
def test_server_that_does_not_start(tmp_path: Path) -> None:
    message = run_failing(SERVER, tmp_path)
    assert "before it was ready" in message
    assert "there/is/no/model" in message
