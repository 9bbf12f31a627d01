"""A chapter of the lineage that is measured again replaces that chapter only, and says where and why."""

import sys

import pytest

from helpers.load_script import ROOT, load_script


def test_one_chapter_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])  # its neighbors are imported by name
    script = load_script("benchmarks/studied_chapter.py")
    story = {"commit": "old", "chapters": {"order": [{"cell": "a"}], "equivariance": [{"cell": "b", "value": 1.0}]}}
    row = {"cell": "b", "series": "s", "x": "x", "seed": 0, "accuracy": None, "value": 2.0}
    script.replace_chapter(story, "equivariance", [row], {"commit": "new"})
    assert story["commit"] == "old"
    assert story["chapters"]["order"] == [{"cell": "a"}]
    assert story["chapters"]["equivariance"] == [{"cell": "b", "series": "s", "x": "x", "diverged": 0, "value": 2.0}]
    assert story["remeasured"] == {"equivariance": {"commit": "new"}}
