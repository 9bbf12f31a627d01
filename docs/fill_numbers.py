"""Numbers of the documentation, generated from results/*.json.

In Markdown, `<!--n:RESULT:PATH:FORMAT-->VALUE<!--/n-->` holds a value of results/RESULT.json in a Python format
spec (it may be empty). PATH is dotted. A segment is a key, an index of a list, or `key=value` (several joined by
`&`), which selects the first matching item of a list; keys with dots or colons stand in double quotes. `PATH /
PATH` is a ratio. Functions around a path: count, mean, min, max, last (of a list or an object's values), minutes
(from seconds), megabytes (from bytes), cpu (the name of a machine). `points(PATH - PATH)` is the difference of two
fractions in percentage points. `python docs/fill_numbers.py` rewrites all
values, `--check` lists wrong ones.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"<!--n:(?P<result>[\w-]+):(?P<path>.+?):(?P<format>[^:]*?)-->(?P<value>.*?)<!--/n-->")
OPENING = re.compile(r"<!--n:")
SEGMENT = re.compile(r'"([^"]*)"|([^."]+)')
DIFFERENCE = re.compile(r"points\((.+) - (.+)\)")
CALL = re.compile(r"(count|mean|min|max|last|minutes|megabytes|cpu)\((.+)\)")
TYPED = re.compile(r"<!--typed: *\S.*?-->")
NUMBER = re.compile(r"\d[\d.,]*\s?%|\d[\d.,]*x\b|\d[\d.,]*\s?images/s")
KINDS = {"AVX512": "AMD EPYC with AVX-512 (Zen 4)", "AVX2": "AMD EPYC with AVX2"}


@dataclass(frozen=True)
class Wrong:
    """A marker whose written value is not the one in the JSON file."""

    file: Path
    line: int
    written: str
    measured: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: written {self.written!r}, results/ say {self.measured!r}"


def cpu(machine: dict[str, Any]) -> str:
    """Name the kind of CPU and the cores of a result's machine."""
    return f"{KINDS[machine['capability']]}, {machine['cores']} cores"


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "count": len,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "last": lambda values: list(values.values() if isinstance(values, dict) else values)[-1],
    "minutes": lambda seconds: seconds / 60,
    "megabytes": lambda size: size / 1e6,
    "cpu": cpu,
}


def step(value: Any, segment: str) -> Any:
    """Follow one segment of a path."""
    if isinstance(value, dict):
        return value[segment]
    if segment.lstrip("-").isdigit():
        return value[int(segment)]
    wanted = dict(pair.split("=", 1) for pair in segment.split("&"))
    for item in value:
        if all(str(item.get(key)) == text for key, text in wanted.items()):
            return item
    raise KeyError(segment)


def look_up(result: Any, path: str) -> Any:
    """Evaluate a path, a function of a path, or a ratio or difference of two."""
    if pair := DIFFERENCE.fullmatch(path):
        return 100 * (look_up(result, pair[1]) - look_up(result, pair[2]))
    if " / " in path:
        above, below = path.split(" / ")
        return look_up(result, above) / look_up(result, below)
    if call := CALL.fullmatch(path):
        return FUNCTIONS[call[1]](look_up(result, call[2]))
    for match in SEGMENT.finditer(path):
        result = step(result, match[2] if match[1] is None else match[1])
    return result


def measured(match: re.Match[str], results: Path) -> str:
    """Format what a marker's JSON file says; a marker that cannot be evaluated says why."""
    try:
        content = json.loads((results / f"{match['result']}.json").read_text(encoding="utf-8"))
        return format(look_up(content, match["path"]), match["format"])
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{match[0]}: {type(error).__name__}: {error}") from error


def wrong_numbers(file: Path, results: Path) -> list[Wrong]:
    """List the markers of a file that are not up to date or cannot be read."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        markers = list(MARKER.finditer(line))
        if len(markers) != len(OPENING.findall(line)):
            found.append(Wrong(file, number, line.strip()[:80], "a marker is malformed"))
        for match in markers:
            try:
                value = measured(match, results)
            except ValueError as error:
                value = f"no value ({error})"
            if value != match["value"]:
                found.append(Wrong(file, number, match["value"], value))
    return found


def typed_numbers(file: Path) -> list[tuple[int, str]]:
    """List percentages, ratios and images/s outside of markers, code and lines with `<!--typed: reason-->`."""
    found, fenced = [], False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not TYPED.search(line):
            text = re.sub(r"`[^`]*`|<!--.*?-->|\]\([^)]*\)|<[^>]+>", " ", MARKER.sub(" ", line))
            found += [(number, match[0]) for match in NUMBER.finditer(text)]
    return found


def rewrite(file: Path, results: Path) -> bool:
    """Write the measured values into a file; tell whether it changed."""
    text = file.read_text(encoding="utf-8")
    new = MARKER.sub(
        lambda m: f"<!--n:{m['result']}:{m['path']}:{m['format']}-->{measured(m, results)}<!--/n-->",
        text,
    )
    if new != text:
        file.write_text(new, encoding="utf-8")
    return new != text


def pages(root: Path = ROOT) -> list[Path]:
    """List the Markdown files that may contain markers."""
    readmes = [root / name for name in ("README.md", "README.ko.md", "results/README.md")]
    return [file for file in readmes if file.exists()] + sorted((root / "docs").rglob("*.md"))


def main() -> int:
    """Rewrite or check the numbers of all pages."""
    parser = argparse.ArgumentParser(description="Write the numbers of results/ into the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a number is not up to date")
    if parser.parse_args().check:
        wrong = [item for file in pages() for item in wrong_numbers(file, ROOT / "results")]
        print("\n".join(map(str, wrong)) or "all numbers are up to date")
        return 1 if wrong else 0
    for file in pages():
        if rewrite(file, ROOT / "results"):
            print(f"rewrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
