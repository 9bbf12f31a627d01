"""Where tests find real weights, real images and golden outputs, and what they do without them."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("PATCHWORD_SHARED", Path(__file__).parents[3] / "shared"))


def shared_path(relative: str) -> Path:
    """A file or folder of the shared data, or a skip that says what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs {relative} of the shared data (set PATCHWORD_SHARED)", allow_module_level=True)
    return path
