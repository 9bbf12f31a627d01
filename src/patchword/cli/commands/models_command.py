"""`patchword models`: list the models that there are."""

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any

from ...errors import ConfigError
from ..arguments import positional
from ..help_pages import fit, heading, page_width
from ..model_args import JsonFlag
from ..output import print_json

Row = dict[str, Any]
GATED = "* gated: accept the license on the page of the model, then set HF_TOKEN to a token of your account."
HUB_TITLE = "Hugging Face Hub: parameters, image size, license of the weights"
PRESETS_TITLE = "Presets to train from scratch (--model NAME): parameters with 1,000 classes"
HUB_NOTE = "This is a selection: other models of these kinds can be read, too."


def list_models(query: Annotated[str | None, positional("[QUERY]")] = None, json: JsonFlag = False) -> int:
    """List the models that there are: well-known names on the hub, presets to train, and formats that can be read.

    Example: patchword models dinov3

    Nothing is downloaded. patchword show MODEL prints what one model is.

    Args:
        query: show only what contains these words, e.g. siglip2 or "mit 224"
    """
    tables = all_tables()
    found = {title: [row for row in rows if matches(row, query or "")] for title, rows in tables.items()}
    if not any(found.values()):
        raise no_match(str(query), tables.values())
    if json:
        print_json(found)
    else:
        print_models(found)
    return 0


def all_tables() -> dict[str, list[Row]]:
    """Return the rows of each table, as JSON."""
    from ...checkpoints.known_models import bundled_models, families, hub_models
    from ...config.presets import PRESETS, preset
    from ...models import tensor_shapes

    sizes = {name: sum(t.numel() for t in tensor_shapes(preset(name)).values()) for name in PRESETS}
    return {
        "bundled": [vars(model) for model in bundled_models()],
        "hub": [vars(model) for model in hub_models()],
        "presets": [{"name": name, "parameters": count} for name, count in sizes.items()],
        "families": [vars(family) for family in families()],
    }


def matches(row: Row, query: str) -> bool:
    """Whether the texts of a row contain every word of a query."""
    text = " ".join(str(value) for value in row.values() if not isinstance(value, bool)).lower()
    return all(word in text for word in query.lower().split())


def no_match(query: str, tables: Iterable[Sequence[Row]]) -> ConfigError:
    """Make the error for a query without results; it suggests names and words of names."""
    names = [str(row.get("reference") or row["name"]) for rows in tables for row in rows]
    words = {word for name in names for word in [name, *re.split(r"[/:._-]", name)]}
    near = difflib.get_close_matches(query, sorted(words, key=str.lower), n=3)
    hint = f" Similar: {', '.join(near)}." if near else ""
    return ConfigError(f"No model, preset or format contains {query!r}.{hint}", code="unknown_model")


def print_models(tables: dict[str, list[Row]]) -> None:
    """Print the tables that have rows."""
    sections = []
    if rows := tables["bundled"]:
        sections.append([heading("Bundled with patchword"), *model_lines(rows)])
    if rows := tables["hub"]:
        sections.append([heading(HUB_TITLE), fit(HUB_NOTE)])
        for use, group in groupby(rows, key=lambda row: row["use"]):
            sections.append([fit(f"{use}:"), *model_lines(list(group))])
        if any(row["gated"] for row in rows):
            sections.append([fit(GATED)])
    if rows := tables["presets"]:
        sections.append([heading(PRESETS_TITLE), *preset_lines(rows)])
    if rows := tables["families"]:
        sections.append([heading("Formats of checkpoints"), *family_lines(rows)])
    print("\n\n".join("\n".join(lines) for lines in sections))


def model_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each model, and one for its remark."""
    width = max(len(row["reference"]) for row in rows)
    lines = []
    for row in rows:
        license_name = row["license"] + "*" * row["gated"]
        facts = f"{format_millions(row['parameters']):>7}  {row['image_size']:>3}  {license_name}"
        lines.append(f"  {row['reference']:{width}}{facts}")
        lines += [fit(f"      {row['remark']}", indent=" " * 6)] if row["remark"] else []
    return lines


def preset_lines(rows: Sequence[Row]) -> list[str]:
    """Return the presets in as many columns as fit."""
    cells = [f"{row['name']:9}{format_millions(row['parameters']):>7}" for row in rows]
    per_line = max(1, page_width() // 20)
    return ["  " + "    ".join(cells[i : i + per_line]) for i in range(0, len(cells), per_line)]


def family_lines(rows: Sequence[Row]) -> list[str]:
    """Return the formats, with whether `convert` writes them."""
    width = max(len(row["name"]) for row in rows)
    margin = " " * (width + 18)
    ways = {True: "reads, writes", False: "reads"}
    return [
        fit(f"  {row['name']:{width}}  {ways[row['writable']]:13} {row['description']}", indent=margin) for row in rows
    ]


def format_millions(count: int) -> str:
    """Format a number of parameters: "5.7M" or "1.14B"."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
