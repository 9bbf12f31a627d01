"""The page of an inspection."""

from collections.abc import Sequence

from ..figures.exhibit import Exhibit
from .document import document, notes_list, section
from .exhibited import shown
from .text import escape, table


def inspection_html(
    title: str, facts: Sequence[tuple[str, str]], exhibits: Sequence[Exhibit], notes: Sequence[str] = ()
) -> str:
    """`facts` are lines about the model, of plain text."""
    body = table([(escape(key), escape(value)) for key, value in facts])
    body += shown(exhibits)
    absent = [f"{each.title}: {each.seen}" for each in exhibits if each.draw is None]
    body += section("What does not apply to this model", notes_list(absent))
    body += section("Notes", notes_list(notes))
    return document(title, "patchword inspection", body)
