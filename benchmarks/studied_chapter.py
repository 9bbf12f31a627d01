"""Measure one chapter of the lineage again, with present code, and replace that part of results/study_lineage.json.

    python benchmarks/studied_chapter.py CHAPTER OUT --budget 18s --reason "what has changed"

Runs `patchword study CHAPTER` in the directory OUT, with as many seeds as the whole story. The other chapters stay as
they are; commit, date and machine of the new part, and the reason, are stored under "remeasured".
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, dump_json, provenance
from studied import summarize

STORY = RESULTS / "study_lineage.json"


def replace_chapter(story: dict[str, Any], chapter: str, rows: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Replace a chapter of the stored story by the summary of new rows, and store how these were measured."""
    story["chapters"][chapter] = summarize(rows)
    story.setdefault("remeasured", {})[chapter] = run


def main() -> None:
    story = json.loads(STORY.read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("chapter", choices=story["chapters"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", required=True)
    parser.add_argument("--reason", required=True)
    args = parser.parse_args()
    command = ["study", args.chapter, "--budget", args.budget, "--seeds", str(story["seeds"])]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "patchword", *command, "--out", str(args.out)], check=True)
    seconds = time.monotonic() - started
    rows = json.loads((args.out / "results.json").read_text())["rows"]
    run = {**provenance(), "command": f"patchword {' '.join(command)}", "seconds": seconds, "reason": args.reason}
    replace_chapter(story, args.chapter, rows, run)
    STORY.write_text(dump_json(story) + "\n")
    print(STORY)


if __name__ == "__main__":
    main()
