"""Every result names its benchmark and a commit of the history."""

from pathlib import Path

import pytest

from helpers.load_script import load_script
from patchword.studies import LINEAGE_STUDIES, make_study

ROOT = Path(__file__).parents[2]
stale = load_script("benchmarks/stale.py")


def test_every_result_has_an_entry_and_every_entry_a_result():
    assert set(stale.SOURCES) == set(stale.load_results())


@pytest.mark.parametrize("name", stale.SOURCES)
def test_measured_paths_exist(name):
    assert [path for path in stale.measured_paths(name) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", [name for name in LINEAGE_STUDIES if f"study_{name}" in stale.SOURCES])
def test_studies_are_measured_by_the_code_of_their_runs(name):
    for cell in make_study(name).cells:
        for measured in (type(cell.config), getattr(getattr(cell.config, "measure", None), "func", None)):
            if measured is not None:
                module = f"src/{measured.__module__.replace('.', '/')}.py"
                assert module.startswith(stale.measured_paths(f"study_{name}"))
                assert module.startswith(stale.measured_paths("study_lineage")) or name == "gan"


@pytest.mark.skipif(not stale.has_history(), reason="no git history, or a shallow clone")
def test_every_commit_is_in_the_history():
    assert stale.problems(stale.load_results()) == []


@pytest.mark.skipif(not stale.has_history(), reason="no git history, or a shallow clone")
def test_unknown_commits_and_results_are_reported():
    results = stale.load_results() | {"new": {"commit": "0" * 40}}
    assert len(stale.problems(results)) == 2
    results["study_lineage"]["remeasured"] = {"order": {"commit": "1" * 40}}
    assert len(stale.problems(results)) == 3, "also of a part that was measured again"


def test_only_a_change_of_meaning_counts():
    before = 'def f(x):\n    """Old."""\n    return x + 1\n'
    assert stale.meaning(before) == stale.meaning('def f(x):  # note\n    """New."""\n    return (x + 1)\n')
    assert stale.meaning(before) != stale.meaning("def f(x):\n    return x + 2\n")
    assert stale.meaning("a: int = 1\n") == stale.meaning('a: int = 1\n"""The attribute a."""\n')


def test_every_result_is_described_in_the_readme_of_results():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert [name for name in stale.SOURCES if f"[`{name}.json`]({name}.json)" not in text] == []
