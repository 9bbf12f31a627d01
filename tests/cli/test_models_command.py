"""`patchword models`: what is listed, the search, and the width of the output."""

import json

import pytest

from helpers.command import run_in_process
from patchword.checkpoints.known_models import families, hub_models
from patchword.config.presets import PRESETS

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("columns", [80, 120])
def test_everything_is_listed_and_fits(columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run_in_process(capsys, "models")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    for name in ("patchword:cifar10", *(model.reference for model in hub_models()), *PRESETS):
        assert sum(name in line.split() for line in lines) == 1, name
    for family in families():
        assert any(line.startswith(f"  {family.name} ") for line in lines)


def test_query_filters_every_table(capsys: Capture) -> None:
    result = run_in_process(capsys, "models", "DINOv3")
    assert result.returncode == 0
    listed = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  hf:")]
    assert listed == [model.reference for model in hub_models() if "dinov3" in model.reference]
    assert "* gated" in result.stdout
    formats = result.stdout.partition("Formats of checkpoints")[2]
    assert all(f"\n  {name} " in formats for name in ("transformers", "dinov3", "timm"))
    assert "patchword:cifar10" not in result.stdout
    assert "Ti/16" not in result.stdout
    assert "* gated" not in run_in_process(capsys, "models", "dinov2").stdout
    assert run_in_process(capsys, "models", "r50+b/16").stdout.splitlines()[1:] == ["  R50+B/16   98.7M"]


def test_all_words_of_a_query_must_occur(capsys: Capture) -> None:
    document = json.loads(run_in_process(capsys, "models", "siglip2 384", "--json").stdout)
    names = [row["reference"] for row in document["hub"]]
    assert names == ["hf:google/siglip2-large-patch16-384", "hf:google/siglip2-so400m-patch16-384"]
    assert document["presets"] == document["families"] == document["bundled"] == []


def test_json_is_the_whole_table(capsys: Capture) -> None:
    document = json.loads(run_in_process(capsys, "models", "--json").stdout)
    assert [row["reference"] for row in document["hub"]] == [model.reference for model in hub_models()]
    assert [row["name"] for row in document["presets"]] == list(PRESETS)
    assert {row["name"]: row["parameters"] for row in document["presets"]}["Ti/16"] == 5_717_416


@pytest.mark.parametrize(
    ("query", "suggestion"),
    [
        ("dinvo2", "dinov2"),
        ("hf:google/siglip2-base-patch16-244", "hf:google/siglip2-base-patch16-224"),
        ("big-vision", "big_vision"),
    ],
)
def test_no_match_suggests_similar_names(query: str, suggestion: str, capsys: Capture) -> None:
    result = run_in_process(capsys, "models", query)
    assert (result.returncode, result.stdout) == (2, "")
    assert suggestion in result.stderr
    assert run_in_process(capsys, "models", suggestion).returncode == 0


def test_no_match_without_a_similar_name(capsys: Capture) -> None:
    result = run_in_process(capsys, "models", "zzzzzzzz")
    assert (result.returncode, result.stdout) == (2, "")
