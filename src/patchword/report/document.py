"""The frame that every page of ours has: one file, no network, only its own script allowed to run."""

import base64
import hashlib
from collections.abc import Sequence

from .. import __version__
from .style import STYLE
from .text import escape, name


def document(title: str, kind: str, body: str, script: str = "") -> str:
    """The whole page; `kind` says above the title what it is."""
    # Only this very script may run: should a label's markup ever slip through, the browser refuses it.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<p class="kind">{escape(kind)}</p><h1>{name(title)}</h1>
{body}
<footer>Made by patchword {escape(__version__)}. This page needs no network; all of it is in this file.</footer>
</main><script>{script}</script></body></html>
"""


def section(title: str, body: str, *, lead: str = "", tag: str = "div") -> str:
    if not body:
        return ""
    before = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{title}</h2>{before}<{tag}>{body}</{tag.split()[0]}></section>\n"


def notes_list(notes: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
