"""Text for people: counts, plurals, messages, and names that are safe to print."""

import sys
import unicodedata

# Bidirectional control characters: with them, a file named "photo_gpj.exe" can be displayed as "photo_exe.jpg".
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control characters, lone surrogates, line and paragraph separators


def format_count(value: int) -> str:
    """Format an integer with thousands separators, as in "1,234"."""
    return f"{value:,}"


def pluralize(value: int, noun: str, ending: str = "s") -> str:
    """Format a count with its noun, as in "1 image" and "2,000 images".

    Args:
        value: The count.
        noun: The noun in the singular.
        ending: The ending of the plural.
    """
    return f"{format_count(value)} {noun}{'' if value == 1 else ending}"


def escape_unprintable(text: str) -> str:
    r"""Make an untrusted name, such as that of a file or class, safe to print.

    Returns:
        One line, in which control characters, lone surrogates and text-direction marks are escaped, as in \n and
        \udc80.
    """
    if text.isprintable():
        return text
    return "".join(_escape(c) if c in _BIDI_CONTROLS or unicodedata.category(c) in _UNPRINTABLE else c for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException, limit: int = 160) -> str:
    """Format the message of an exception as one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def print_stderr(message: str) -> None:
    """Print a message to standard error; standard output is reserved for results."""
    print(message, file=sys.stderr)
