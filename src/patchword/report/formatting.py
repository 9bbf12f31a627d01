"""Text and numbers for people. Escaping is not done here: the Jinja environment escapes every value."""

import re
import unicodedata
from typing import Any

from ..core.text import escape_unprintable

NARROW_SPACE = "\u202f"  # between a number and its unit; does not break


def shorten(text: str, limit: int) -> str:
    """Keep both ends of a long text: file names often differ only in their last characters."""
    text = escape_unprintable(text)
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def break_points(text: str) -> list[str]:
    """Split after each underscore and slash, where a browser would not break a line by itself."""
    return re.split(r"(?<=[_/])", text)


def text_width(text: str) -> float:
    """Approximate width of a text, in units of its font size."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.56 for c in text)


def percent(value: float, digits: int = 1) -> str:
    """Format a fraction, 0.123 as 12.3%."""
    return f"{100 * value:.{digits}f}%"


def duration(seconds: float) -> str:
    """Format a time span with its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f}{NARROW_SPACE}s" if seconds < 10 else f"{seconds:.0f}{NARROW_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}{NARROW_SPACE}h {minutes}{NARROW_SPACE}min"
    return f"{minutes}{NARROW_SPACE}min {rest}{NARROW_SPACE}s"


def plain(value: Any) -> str:
    """Format nested metadata in one line, without brackets and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
