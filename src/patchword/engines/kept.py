"""Answers about this machine, kept in the user's cache; one that cannot be used costs time, not the answer."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..data.cache import cache_folder
from ..errors import DataError

Answer = TypeVar("Answer")


def recall(name: str, read: Callable[[object], Answer]) -> Answer | None:
    """What was kept under that name, as `read` makes it out of JSON; None if there is nothing that it can read."""
    with contextlib.suppress(OSError, DataError, ValueError, TypeError, KeyError):
        return read(json.loads(place(name).read_text()))
    return None


def keep(name: str, answer: object) -> None:
    with contextlib.suppress(OSError, DataError):
        path = place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(answer))
        os.replace(part, path)


def place(name: str) -> Path:
    return cache_folder() / "engines" / f"{name}.json"
