"""Text for people: counts, plurals, messages, and names that are safe to print."""

import sys
import unicodedata

# These turn the direction of the text around them: a file "photo_gpj.exe" would be shown as "photo_exe.jpg".
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNSEEN = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control characters, half surrogates, line and paragraph separators


def count(value: int) -> str:
    """Format an integer with thousands separators, as in "1,234"."""
    return f"{value:,}"


def plural(value: int, noun: str, ending: str = "s") -> str:
    """Format a count with its noun, as in "1 image" and "2,000 images".

    Args:
        value: How many there are.
        noun: The noun in the singular.
        ending: What the plural appends.
    """
    return f"{count(value)} {noun}{'' if value == 1 else ending}"


def visible(text: str) -> str:
    """Make the name of a file or class safe to print: names come from anywhere and may hold anything.

    Returns:
        One line, in which characters that cannot be seen or printed are escaped, as in \\n and \\udc80.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) if c in _DIRECTIONS or unicodedata.category(c) in _UNSEEN else c for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException, limit: int = 160) -> str:
    """Describe an exception in one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def tell(message: str) -> None:
    """Print a message to standard error: standard output belongs to results."""
    print(message, file=sys.stderr)
