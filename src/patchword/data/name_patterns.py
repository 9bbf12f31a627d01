"""Patterns of file names: numbered ranges such as "train-{000..127}.tar"."""

import re
from collections.abc import Iterator

from ..errors import DataError

_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_MAX_FILES = 1_000_000  # in one {000..999} range


def expand_numbers(pattern: str) -> Iterator[str]:
    """Yield a pattern for each number of every {000..012} in it; a pattern without such a range as it is."""
    numbers = _RANGE.search(pattern)
    if numbers is None:
        yield pattern
        return
    first, last = numbers.groups()
    if not 0 <= int(last) - int(first) < _MAX_FILES:
        raise DataError(f"{numbers[0]} in {pattern} must be an ascending range of at most {_MAX_FILES:,} files.")
    for number in range(int(first), int(last) + 1):
        yield from expand_numbers(pattern[: numbers.start()] + str(number).zfill(len(first)) + pattern[numbers.end() :])


def split_pattern(reference: str) -> tuple[str, str]:
    """Split a reference to shards into the folder or URL and the pattern of names; the pattern may be "".

    The folder ends before the first name with a wildcard, or before the name of a tar.
    """
    names = reference.split("/")
    first = next((i for i, name in enumerate(names) if re.search(r"[*?\[{]", name)), None)
    if first is None and names[-1].lower().endswith(".tar"):
        first = len(names) - 1
    if first is None:
        return reference, ""
    return "/".join(names[:first]) or ("/" if reference.startswith("/") else "."), "/".join(names[first:])
