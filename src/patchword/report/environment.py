"""The Jinja environment of all HTML reports, and the content security policy that every page carries."""

import base64
import functools
import hashlib
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from .. import __version__
from ..core.text import escape_unprintable, format_count, pluralize
from .formatting import break_points, percent, shorten


def render(template: str, **values: object) -> str:
    """Render one page: a template of `templates/` with the style sheet and the script inlined."""
    css, js = _asset("report.css"), _asset("report.js")
    # Should markup in a label ever slip through, the browser still refuses to run or apply it.
    policy = f"default-src 'none'; img-src data:; style-src '{_digest(css)}'; script-src '{_digest(js)}'"
    page = _environment().get_template(template)
    return page.render(css=Markup(css), js=Markup(js), policy=policy, version=__version__, **values)


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__, "templates"),
        # Everything is escaped, whatever the template's name: nothing that we render is plain text.
        autoescape=select_autoescape(enabled_extensions=("html.j2",), default_for_string=True, default=True),
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"percent": percent, "count": format_count}
    made.filters |= {"visible": escape_unprintable, "shorten": shorten, "break_points": break_points}
    made.globals |= {"plural": pluralize}
    return made


def _printable(value: object) -> object:
    """Applied to every value before it is escaped: labels and file names may hold control characters."""
    return escape_unprintable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@functools.cache
def _asset(name: str) -> str:
    # read_text() converts line endings to \n, as a browser does before it computes the hash.
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """A CSP hash source, without its quotes."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
