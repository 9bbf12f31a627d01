"""A benchmark whose child process fails ends with the child's error, instead of waiting for it for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.serving import PATIENCE

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

Trainer.training_step = fail  # in the child, too, which imports this file

if __name__ == "__main__":
    measure("small", SHAPES["6x128/4 at 32, batch 256"], ["transformers"], 0.0)
"""
SERVER = """
from serve_load import Running

Running("there/is/no/model")
"""


def failed(code: str, folder: Path, *packages: Path) -> str:
    """What a benchmark that has this code says when it fails."""
    (folder / "benchmark.py").write_text(code)
    path = os.pathsep.join([*map(str, packages), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "benchmark.py"], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("start", "ValueError: no such model"),
        ("fail", "ValueError: no such step"),
        ("die", "The process of echo died with exit code 7"),
    ],
)
def test_a_child_that_fails(fault: str, message: str, tmp_path: Path) -> None:
    assert message in failed(CHILD.replace("FAULT", fault), tmp_path)


def test_a_library_that_is_missing(tmp_path: Path) -> None:
    package = tmp_path / "packages/vit_pytorch"  # in front of the real one, if there is one
    package.mkdir(parents=True)
    for file in ("__init__.py", "vit.py"):
        (package / file).write_text("raise ImportError('part of vit-pytorch is missing')")
    message = failed(LIBRARY, tmp_path, package.parent)
    assert "vit-pytorch failed." in message
    assert "ImportError: part of vit-pytorch is missing" in message


def test_a_trainer_that_fails_in_its_thread(tmp_path: Path) -> None:
    """Transformers' Trainer runs in a thread of the child, which the child waits for."""
    message = failed(THREAD, tmp_path)
    assert "transformers failed." in message
    assert "RuntimeError: out of memory" in message


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    message = failed(SERVER, tmp_path)
    assert "before it was ready" in message
    assert "there/is/no/model" in message
