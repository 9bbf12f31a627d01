"""Names of files and classes, safe to print: they come from anywhere and may hold anything."""

import unicodedata

# These turn the direction of the text around them: a file "photo_gpj.exe" would be shown as "photo_exe.jpg".
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNSEEN = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control characters, half surrogates, line and paragraph separators


def visible(text: str) -> str:
    """In one line, with the characters that cannot be seen or printed written out, as in \\n and \\udc80."""
    if text.isprintable():
        return text
    return "".join(_written_out(c) if c in _DIRECTIONS or unicodedata.category(c) in _UNSEEN else c for c in text)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
