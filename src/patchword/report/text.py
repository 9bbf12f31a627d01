"""Words and numbers, safe to put into HTML. Labels and file names come from anywhere and may hold anything."""

import html
import unicodedata

from ..core.text import visible

_SPACE = "\u202f"  # narrow, and no line break at it


def escape(text: object) -> str:
    return html.escape(visible(str(text)), quote=True)


def name(text: str, most: int = 200) -> str:
    """A label or file name as HTML: shortened in its middle, whole under the pointer, its direction kept to itself."""
    text = visible(text) or "(no name)"
    whole, shown = escape(text), escape(shortened(text, most))
    title = f' title="{whole}"' if whole != shown else ""
    breaks = shown.replace("_", "_<wbr>").replace("/", "/<wbr>")  # where a browser would not break by itself
    return f"<bdi{title}>{breaks}</bdi>"


def shortened(text: str, most: int) -> str:
    """Both ends of a long text: file names often differ only in their last characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def width(text: str) -> float:
    """Roughly how wide a text is, in widths of its font size."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.56 for c in text)


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}{_SPACE}s" if seconds < 10 else f"{seconds:.0f}{_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_SPACE}h {minutes}{_SPACE}min" if hours else f"{minutes}{_SPACE}min {rest}{_SPACE}s"


def table(rows: list[tuple[str, str]]) -> str:
    """A table of two columns; the cells are HTML already."""
    body = "".join(f"<tr><th>{head}</th><td>{cell}</td></tr>" for head, cell in rows)
    return f'<table class="facts">{body}</table>'
