"""Answers about this machine, kept in the user's cache; one that cannot be used costs time, not the answer."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..core.io import atomic_file, cache_folder, write_file
from ..errors import DataError

Answer = TypeVar("Answer")


def recall(name: str, read: Callable[[object], Answer]) -> Answer | None:
    """What was kept under that name, as `read` makes it out of JSON; None if there is nothing that it can read."""
    with contextlib.suppress(OSError, DataError, ValueError, TypeError, KeyError):
        return read(json.loads(place(name).read_bytes()))
    return None


def keep(name: str, answer: object) -> None:
    with contextlib.suppress(OSError, DataError):
        path = place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as made:
            write_file(made, [json.dumps(answer).encode()])


def place(name: str) -> Path:
    return cache_folder() / "engines" / f"{name}.json"
