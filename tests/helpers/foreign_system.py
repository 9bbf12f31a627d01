"""Simulates Windows or macOS for patchword's own code, in a subprocess of test_portability.py.

    foreign_system.py SYSTEM FOLDER    imports every module, trains, predicts and serves; prints the results as JSON

Only imports by patchword's modules are changed. The standard library and other packages run unchanged.
"""

import builtins
import errno
import importlib
import json
import os
import pathlib
import pkgutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"}
POSIX_OS = {
    "sched_getaffinity", "sched_setaffinity", "fork", "forkpty", "sysconf", "statvfs", "fchmod", "chown", "getuid",
    "geteuid", "getgid", "uname", "getloadavg", "nice", "setsid", "killpg", "getpgid", "mkfifo", "O_CLOEXEC",
    "O_NOFOLLOW", "O_DIRECTORY", "posix_fadvise", "sendfile", "register_at_fork", "pread", "pwrite", "wait4",
}  # fmt: skip
POSIX_SIGNALS = {
    "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGSTOP", "SIGCONT",
    "SIGBUS", "pthread_sigmask", "alarm", "setitimer", "sigwait", "SIG_BLOCK", "SIG_SETMASK",
}  # fmt: skip
LINUX_OS = {"sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "splice"}


class SimulatedModule(types.ModuleType):
    """A module as on another system: without some names, with others replaced."""

    def __init__(self, real: types.ModuleType, missing: set[str], replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _missing=missing, **replaced)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        return getattr(self._real, name)


def open_as_windows(path: Any, flags: int, mode: int = 0o777) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, mode)


def sync_as_windows(handle: int) -> None:
    import fcntl

    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(handle)


def context_as_windows(method: str | None = None) -> Any:
    import multiprocessing

    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return multiprocessing.get_context("spawn")


def simulated_modules(system: str) -> tuple[set[str], dict[str, SimulatedModule]]:
    """Return the modules that cannot be imported on that system, and those that differ."""
    import multiprocessing.context
    import signal

    if system == "darwin":
        return set(), {
            "os": SimulatedModule(os, LINUX_OS, {}),
            "sys": SimulatedModule(sys, set(), {"platform": "darwin"}),
        }
    processes = {"get_all_start_methods": lambda: ["spawn"], "get_context": context_as_windows}
    return POSIX_MODULES, {
        "os": SimulatedModule(os, POSIX_OS, {"name": "nt", "open": open_as_windows, "fsync": sync_as_windows}),
        "sys": SimulatedModule(sys, set(), {"platform": "win32"}),
        "signal": SimulatedModule(signal, POSIX_SIGNALS, {}),
        "multiprocessing": SimulatedModule(multiprocessing, set(), processes),
        "multiprocessing.context": SimulatedModule(multiprocessing.context, {"ForkServerProcess", "ForkProcess"}, {}),
    }


def simulate(system: str) -> None:
    """Simulate a system for all later imports by patchword's modules in this process."""
    missing, seen = simulated_modules(system)
    real_import, real_read = builtins.__import__, pathlib.Path.read_text

    def see(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and ((globals or {}).get("__name__") or "").split(".")[0] == "patchword":
            if name.split(".")[0] in missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen and (fromlist or "." not in name):
                return seen[name]
        return real_import(name, globals, locals, fromlist, level)

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real_read(path, *arguments, **options)

    builtins.__import__ = see
    pathlib.Path.read_text = read  # type: ignore[method-assign]


def import_all() -> list[str]:
    import patchword

    names = [module.name for module in pkgutil.walk_packages(patchword.__path__, "patchword.", onerror=raise_it)]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return names


def raise_it(name: str) -> None:
    raise ImportError(name)


def train_and_predict(folder: Path) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    import patchword as pw
    from helpers.runs import tiny_config
    from patchword.inference.inputs import resolve_images
    from patchword.inference.predict import write_prediction_table
    from patchword.training import train

    outcome = train(tiny_config(steps=3), folder / "run")
    assert outcome is not None
    image = folder / "image.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(image)
    classifier = pw.Classifier.load(str(folder / "run"))
    write_prediction_table(classifier, resolve_images([image]), 1, folder / "table.csv")
    return {"steps": outcome.steps, "rows": len((folder / "table.csv").read_text().splitlines())}


def serve(folder: Path) -> int:
    """Return the HTTP status of a prediction."""
    from fastapi.testclient import TestClient

    from patchword.serve import create_app

    with (folder / "log").open("w") as log, TestClient(create_app(str(folder / "run"), log=log)) as client:
        content = (folder / "image.png").read_bytes()
        return client.post("/v1/predict", files={"file": ("image.png", content, "image/png")}).status_code


if __name__ in ("__main__", "__mp_main__"):  # the latter: a process that multiprocessing starts sees the same system
    simulate(sys.argv[1])

if __name__ == "__main__":
    place = Path(sys.argv[2])
    steps: dict[str, Callable[[], Any]] = {"modules": lambda: len(import_all())}
    steps |= {"trained": lambda: train_and_predict(place), "served": lambda: serve(place)}
    print(json.dumps({name: do() for name, do in steps.items()}))
