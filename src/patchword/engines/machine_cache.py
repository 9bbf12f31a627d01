"""Measurements of this machine, stored in the user's cache directory.

A cache that cannot be read or written is ignored: the measurement is repeated.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..core.io import atomic_file, cache_dir, write_file
from ..errors import DataError

Result = TypeVar("Result")


def load_result(name: str, parse: Callable[[Any], Result]) -> Result | None:
    """Load a stored result.

    Args:
        name: The name it was stored under.
        parse: Builds the result from its JSON form.

    Returns:
        None if nothing is stored under that name, or nothing that `parse` accepts.
    """
    with contextlib.suppress(OSError, DataError, ValueError, TypeError, KeyError):
        return parse(json.loads(result_path(name).read_bytes()))
    return None


def store_result(name: str, result: object) -> None:
    """Store a result, which must be JSON-serializable."""
    with contextlib.suppress(OSError, DataError):
        path = result_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            write_file(temporary, [json.dumps(result).encode()])


def result_path(name: str) -> Path:
    """Return the path of the file that holds a result."""
    return cache_dir() / "engines" / f"{name}.json"
