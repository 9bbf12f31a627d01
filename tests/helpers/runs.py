"""Tiny training runs in separate processes, which tests may kill.

A `ForkServer` is a long-lived process that has imported everything and forks a child for each run. This takes a few
milliseconds, while `import torch` takes seconds. It has one thread, so forking is safe; pytest's process has many.
"""

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from patchword.config import AugmentConfig, Config, DataConfig, OptimConfig, ViTConfig
from patchword.core.io import weights_digest
from patchword.errors import PatchwordError
from patchword.training.run_dir import LOCK_FILE

SINGLE_THREAD_ENV = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
TIMING_FIELDS = ("seconds", "images_per_second")  # these differ between identical runs
RECORDED_RUN = Path(__file__).with_name("recorded_run.py")
SIGNAL_POINT_VAR, SIGNAL_VAR = "SIGNAL_AT", "SIGNAL"  # in a child's environment: see `send_signal_at`
ERROR_CODE_SUFFIX = ".code"  # of the file, next to a child's log, with the code of its error
TIMEOUT = 600  # seconds, for a child and for every wait; it only prevents hangs


def tiny_config(**changes: Any) -> Config:
    """A ViT of 18,000 parameters on 8x8 digits, with every feature whose state must survive a kill."""
    config = Config(
        name="tiny",
        data=DataConfig(source="digits", num_workers=0),
        model=ViTConfig(
            image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=32, depth=2, num_heads=2, mlp_dim=64,
            class_token=False, pooling="average", dropout=0.1, attention_dropout=0.1, drop_path=0.1,
        ),
        augment=AugmentConfig(crop="shift", color_jitter=0.2, mixup=0.2),
        optim=OptimConfig(lr=3e-3),
        batch_size=32,
        grad_accum_steps=2,
        steps=140,
        ema=0.98,
        eval_every=0.5,
        save_every=0.1,
        precision="fp32",
    )  # fmt: skip
    return config.replace(**changes)


def write_recipe(path: Path, config: Config) -> str:
    """Write a recipe file; return its path."""
    path.write_text(f"from patchword.config import Config\n\nconfig = Config.from_json({config.to_json()!r})\n")
    return str(path)


class ChildProcess:
    """A run in its own process group."""

    def __init__(self, server: "ForkServer", pid: int, log: Path) -> None:
        self.server, self.pid, self.log = server, pid, log

    def send_signal(self, signum: int) -> None:
        os.killpg(self.pid, signum)  # valid until `wait`, even if the process has exited

    def wait(self) -> int:
        """Return the exit code; -N if signal N ended the process."""
        return self.server.request(wait=self.pid)

    def has_exited(self) -> bool:
        """Whether the process has ended; until `wait` it is a zombie."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def kill(self) -> int:
        self.send_signal(signal.SIGKILL)
        return self.wait()

    def output(self) -> str:
        return self.log.read_text()

    def error_code(self) -> str:
        """Return the code of the PatchwordError that ended the process; "" if there was none."""
        path = self.log.with_suffix(ERROR_CODE_SUFFIX)
        return path.read_text() if path.exists() else ""


class ForkServer:
    """`with ForkServer(folder) as server: server.start("train", "recipe.py", "--out", "run").wait()`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        command = [sys.executable, str(Path(__file__))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=SINGLE_THREAD_ENV, text=True
        )
        self.request(run=[], log=os.devnull, environment={})  # responds when everything is imported

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.communicate(timeout=TIMEOUT)  # closes its input, at which it exits

    def request(self, **fields: Any) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *arguments: str | Path, **environment: str) -> ChildProcess:
        """Start `patchword ARGUMENTS`, or a Python file with arguments, in a new process."""
        self.count += 1
        log = self.folder / f"child-{self.count}.log"
        command = [str(argument) for argument in arguments]
        return ChildProcess(self, self.request(run=command, log=str(log), environment=environment), log)


@functools.cache
def shared_fork_server() -> ForkServer:
    """The fork server of the test session; it takes seconds to start."""
    folder = Path(tempfile.mkdtemp())
    server = ForkServer(folder)
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.__exit__)
    return server


def serve_requests() -> None:
    """Fork and wait on request: the main loop of the fork server's process."""
    import torch

    torch.set_num_threads(1)
    import sklearn.datasets  # noqa: F401  # imported once here, not in every child
    import torch._dynamo

    import patchword.cli.commands.train_command
    import patchword.training.console

    for line in sys.stdin:
        request = json.loads(line)
        if not request.get("run", True):
            response = 0
        elif "wait" in request:
            response = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            response = os.fork()
            if response == 0:
                os.setpgid(0, 0)
                patchword.cli.commands.train_command.START_TIME = time.monotonic()
                run_request(request)
            os.setpgid(response, response)
        print(response, flush=True)


def run_request(request: dict[str, Any]) -> None:
    """Run a command in a forked child and exit with its code; never returns."""
    import runpy
    import traceback

    from patchword.cli.main import main

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(TIMEOUT)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["environment"])
        if point := os.environ.get(SIGNAL_POINT_VAR):
            send_signal_at(point, int(os.environ[SIGNAL_VAR]))
        command = request["run"]
        if command[0].endswith(".py"):
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
            code = 0
        else:
            main(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.__context__, PatchwordError):  # `main` printed its message
            Path(request["log"]).with_suffix(ERROR_CODE_SUFFIX).write_text(error.__context__.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def send_signal_at(point: str, signum: int) -> None:
    """Make this process send itself a signal: before the first step, at a step, or in a save, an evaluation, the end.

    A signal from another process could arrive too late on a busy machine.
    """
    from patchword.training import checkpointing
    from patchword.training import run as run_module
    from patchword.training.trainer import Trainer

    points: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "start": (run_module.Run, "run", lambda *_: True),
        # The model is written already.
        "save": (checkpointing, "write_file", lambda path, *_: path.name == checkpointing.STATE_FILE),
        "evaluation": (run_module, "evaluate_split", lambda *_: True),
        "finish": (run_module, "write_training_report", lambda *_: True),  # the model is published already
    }
    at_step = (Trainer, "train_step", lambda trainer, *_: trainer.step >= int(point))
    owner, name, is_due = points.get(point, at_step)
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if is_due(*args):
            os.kill(os.getpid(), signum)
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without timing fields."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMING_FIELDS} for row in parsed]


def final_state(run: Path, steps: int) -> dict[str, Any]:
    """Return everything of a finished run that must be bit-identical, however often it was interrupted."""
    last = run / "checkpoints" / f"step-{steps:08d}"
    # safetensors writes the metadata of a shard in random order
    files = {path.name: weights_digest(load_file(path)) for path in last.glob("*.safetensors")}
    return {"model": sha256(run / "model.safetensors"), "files": files, "rows": rows(run)}


def leftovers(run: Path) -> list[str]:
    """Return temporary files and directories, except the lock file, which a killed process leaves behind."""
    temporary = [path for path in run.rglob("*") if path.name.startswith(".") or ".part" in path.name]
    return [str(path.relative_to(run)) for path in temporary if path != run / LOCK_FILE]


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> bool:
    """Poll until the condition holds; False after a timeout."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def is_finished(run: Path) -> bool:
    """Whether the run has published its model."""
    return (run / "model.json").exists()


def last_logged_step(run: Path) -> int:
    """Return the step of the last row in metrics.jsonl; 0 if there is none."""
    path = run / "metrics.jsonl"
    steps = re.findall(rb'"step": (\d+),', path.read_bytes()) if path.exists() else []
    return int(steps[-1]) if steps else 0


def start_or_resume(server: ForkServer, recipe: str, run: Path, **environment: str) -> ChildProcess:
    """Start a run; resume it if it exists."""
    command = ("resume", run) if run.exists() else ("train", recipe, "--out", run)
    return server.start(*command, **environment)


def signal_env(point: str | int, signum: int = signal.SIGKILL) -> dict[str, str]:
    """Return the environment of a child that sends itself a signal at a point of `send_signal_at`."""
    return {SIGNAL_POINT_VAR: str(point), SIGNAL_VAR: str(int(signum))}


def run_with_kills(server: ForkServer, recipe: str, run: Path, points: Iterable[str | int | float]) -> list[str]:
    """Train to the end, with a SIGKILL at each point that is reached; return the kinds of these kills.

    A point is one of `send_signal_at`, a step, or a number of seconds, in which a fast machine may finish the run.
    """
    kills = []
    for point in points:
        if isinstance(point, float):
            child = start_or_resume(server, recipe, run)
            wait_until(lambda: is_finished(run), point)
            code = child.kill()
        else:
            code = start_or_resume(server, recipe, run, **signal_env(point)).wait()
        if code == -signal.SIGKILL:
            kills.append(point if isinstance(point, str) else "random")
        if is_finished(run):
            return kills
    child = start_or_resume(server, recipe, run)
    assert child.wait() == 0, child.output()
    return kills


def free_port() -> str:
    """Return a TCP port that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def start_ranks(
    server: ForkServer, world_size: int, *arguments: str | Path, script: Path = RECORDED_RUN, **environment: str
) -> list[ChildProcess]:
    """Start the script in `world_size` processes with torchrun's environment; recorded_run.py logs to LOG.RANK."""
    port = free_port()
    children = []
    for rank in range(world_size):
        recipe_and_run, log, rest = arguments[:2], arguments[2:3], arguments[3:]
        torchrun_env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        torchrun_env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = (torchrun_env if world_size > 1 else {}) | environment
        children.append(server.start(script, *recipe_and_run, *(f"{p}.{rank}" for p in log), *rest, **variables))
    return children


def assert_exit_codes(children: list[ChildProcess], code: int) -> None:
    """Wait for all processes and check that each exits with this code."""
    codes = [child.wait() for child in children]
    assert codes == [code] * len(children), "\n".join(child.output() for child in children)


if __name__ == "__main__":
    serve_requests()
