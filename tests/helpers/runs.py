"""Tiny training runs in processes of their own, which tests may kill.

A `Nursery` is a long-lived process that has imported everything and forks a child for each run: a child costs a few
milliseconds instead of the seconds of `import torch`. It has one thread, so forking is safe; pytest's process has many.
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

from patchword.config import AugmentConfig, Config, DataConfig, OptimConfig, ViTConfig
from patchword.training.run_dir import LOCK_FILE

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
CLOCKS = ("seconds", "images_per_second")  # what differs between two runs that are the same
SCRIPT = Path(__file__).with_name("recorded_run.py")
MOMENT, NUMBER = "SIGNAL_AT", "SIGNAL"  # in a child's environment: see `signal_at`
PATIENCE = 600  # seconds that a child may live, and that anything is waited for: no measure of how fast it is


def tiny(**changes: Any) -> Config:
    """A ViT of 18,000 weights on 8x8 digits, with everything switched on that must survive a kill."""
    config = Config(
        name="tiny",
        data=DataConfig(source="digits", num_workers=0),
        model=ViTConfig(
            image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=32, depth=2, num_heads=2, mlp_dim=64,
            class_token=False, pooling="average", dropout=0.1, drop_path=0.1,
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
    path.write_text(f"from patchword.config import Config\n\nconfig = Config.from_json({config.to_json()!r})\n")
    return str(path)


class Child:
    """A run in a process group of its own."""

    def __init__(self, nursery: "Nursery", pid: int, log: Path) -> None:
        self.nursery, self.pid, self.log = nursery, pid, log

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)  # it stays until `wait` has been called, even if it has ended

    def wait(self) -> int:
        """The exit code; -N if signal N ended it."""
        return self.nursery.ask(wait=self.pid)

    def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return self.wait()

    def output(self) -> str:
        return self.log.read_text()


class Nursery:
    """`with Nursery(folder) as nursery: nursery.run("train", "recipe.py", "--out", "run").wait()`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        command = [sys.executable, str(Path(__file__))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
        )
        self.ask(run=[], log=os.devnull, environment={})  # it answers when it has imported everything

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *failure: object) -> None:
        self.process.communicate(timeout=PATIENCE)  # the end of its input is its end

    def ask(self, **request: Any) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def run(self, *arguments: str | Path, **environment: str) -> Child:
        """`patchword ARGUMENTS`, or a Python file with arguments, in a new process."""
        self.count += 1
        log = self.folder / f"child-{self.count}.log"
        words = [str(word) for word in arguments]
        return Child(self, self.ask(run=words, log=str(log), environment=environment), log)


@functools.cache
def shared_nursery() -> Nursery:
    """One for all tests of a session, since it takes seconds to start."""
    folder = Path(tempfile.mkdtemp())
    nursery = Nursery(folder)
    atexit.register(shutil.rmtree, folder)
    atexit.register(nursery.__exit__)
    return nursery


def serve() -> None:
    """What the nursery's process does: forks on request, and waits on request."""
    import torch

    torch.set_num_threads(1)
    import sklearn.datasets  # noqa: F401  # imported once here, not in every child
    import torch._dynamo

    import patchword.cli.commands.train_command
    import patchword.training.console

    for line in sys.stdin:
        request = json.loads(line)
        if not request.get("run", True):
            answer = 0
        elif "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os.setpgid(0, 0)
                patchword.cli.commands.train_command.START_TIME = time.monotonic()
                become(request)
            os.setpgid(answer, answer)
        print(answer, flush=True)


def become(request: dict[str, Any]) -> None:
    """Ends as the command would end; never returns."""
    import runpy
    import traceback

    from patchword.cli.main import main

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(PATIENCE)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for handle in (1, 2):
            os.dup2(log, handle)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["environment"])
        if moment := os.environ.get(MOMENT):
            signal_at(moment, int(os.environ[NUMBER]))
        words = request["run"]
        if words[0].endswith(".py"):
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            code = 0
        else:
            main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def signal_at(moment: str, number: int) -> None:
    """Has this process send itself a signal: before the first step, at a step, or in a save, an evaluation, the end.

    From the inside, since whoever watches a run from the outside may be too late on a busy machine.
    """
    from patchword.training import checkpointing
    from patchword.training import run as run_module
    from patchword.training.trainer import Trainer

    places: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "start": (run_module.Run, "run", lambda *_: True),
        # The model is written already.
        "save": (checkpointing, "write_file", lambda path, *_: path.name == checkpointing.STATE_FILE),
        "evaluation": (run_module, "evaluate_split", lambda *_: True),
        "finish": (run_module, "write_training_report", lambda *_: True),  # the model is published already
    }
    default = (Trainer, "train_step", lambda trainer, *_: trainer.step >= int(moment))
    place, name, is_due = places.get(moment, default)
    function = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if is_due(*arguments):
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    setattr(place, name, call)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in found]


def end_of(run: Path, steps: int) -> dict[str, Any]:
    """All of a finished run that must be the same, bit for bit, however it came to its end."""
    last = run / "checkpoints" / f"step-{steps:08d}"
    return {
        "model": sha256(run / "model.safetensors"),
        "average": sha256(last / "model.safetensors"),
        "state": sha256(last / "state.safetensors"),
        "rows": rows(run),
    }


def leftovers(run: Path) -> list[str]:
    """Files and folders that were only to be there for a moment, but for the file that a killed process had locked."""
    found = [path for path in run.rglob("*") if path.name.startswith(".") or ".part" in path.name]
    return [str(path.relative_to(run)) for path in found if path != run / LOCK_FILE]


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Waits, looking all the time, until something is so; False if it did not come about."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def is_finished(run: Path) -> bool:
    return (run / "model.json").exists()


def last_step(run: Path) -> int:
    """The last step that has a row, so far."""
    path = run / "metrics.jsonl"
    found = re.findall(rb'"step": (\d+),', path.read_bytes()) if path.exists() else []
    return int(found[-1]) if found else 0


def go_on(nursery: Nursery, recipe: str, run: Path, **environment: str) -> Child:
    """Starts a run, or resumes it if there is one."""
    words = ("resume", run) if run.exists() else ("train", recipe, "--out", run)
    return nursery.run(*words, **environment)


def at(moment: str | int, number: int = signal.SIGKILL) -> dict[str, str]:
    """The environment of a child that sends itself a signal at a moment."""
    return {MOMENT: str(moment), NUMBER: str(int(number))}


def killed_again_and_again(nursery: Nursery, recipe: str, run: Path, moments: Iterable[str | int | float]) -> list[str]:
    """A run to its end through a kill at each of the moments, as far as they come; the kinds of those that did.

    A moment is one of `signal_at`, a step, or so many seconds, after which the run may be over on a fast machine.
    """
    kills = []
    for moment in moments:
        if isinstance(moment, float):
            child = go_on(nursery, recipe, run)
            until(lambda: is_finished(run), moment)
            code = child.kill()
        else:
            code = go_on(nursery, recipe, run, **at(moment)).wait()
        if code == -signal.SIGKILL:
            kills.append(moment if isinstance(moment, str) else "random")
        if is_finished(run):
            return kills
    child = go_on(nursery, recipe, run)
    assert child.wait() == 0, child.output()
    return kills


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def together(nursery: Nursery, size: int, *arguments: str | Path, script: Path = SCRIPT) -> list[Child]:
    """The script in `size` processes, told of each other as torchrun does it; recorded_run.py logs to LOG.RANK."""
    port = free_port()
    children = []
    for rank in range(size):
        recipe_and_run, log, rest = arguments[:2], arguments[2:3], arguments[3:]
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = world if size > 1 else {}
        children.append(nursery.run(script, *recipe_and_run, *(f"{p}.{rank}" for p in log), *rest, **environment))
    return children


def assert_exit_codes(children: list[Child], code: int) -> None:
    codes = [child.wait() for child in children]
    assert codes == [code] * len(children), "\n".join(child.output() for child in children)


if __name__ == "__main__":
    serve()
