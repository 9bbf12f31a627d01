"""Numbers in the documentation are those of results/."""

import json
from pathlib import Path

import pytest

from helpers.load_script import load_script

ROOT = Path(__file__).parents[2]
numbers = load_script("docs/fill_numbers.py")

RESULT = {
    "test": {"top1": 0.9346, "top5": 0.9899},
    "rows": [{"n": 1, "v": 2.0}, {"n": 2, "v": 3.0}],
    "a.b: c": 4,
    "seconds": 90,
}
RESULT["sizes"] = [3, 5]


@pytest.fixture
def page(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RESULT))

    def write(text):
        file = tmp_path / "page.md"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize("file", numbers.pages(), ids=lambda file: str(file.relative_to(ROOT)))
def test_numbers_are_up_to_date(file):
    assert [str(item) for item in numbers.wrong_numbers(file, ROOT / "results")] == []


@pytest.mark.parametrize("name", ["README.md", "README.ko.md", "docs/benchmarks.md"])
def test_no_number_is_typed(name):
    assert numbers.typed_numbers(ROOT / name) == []


@pytest.mark.parametrize(
    ("path", "spec", "value"),
    [
        ("test.top1", ".1%", "93.5%"),
        ("rows.1.v", ".2f", "3.00"),
        ("rows.n=2.v / rows.n=1.v", ".1f", "1.5"),
        ('"a.b: c"', "d", "4"),
        ("count(rows)", "d", "2"),
        ("last(rows.0)", ".1f", "2.0"),
        ("last(sizes)", "d", "5"),
        ("minutes(seconds)", ".1f", "1.5"),
        ("points(test.top1 - test.top5)", ".1f", "-5.5"),
    ],
)
def test_markers_are_written_and_then_pass(page, path, spec, value):
    file = page(f"x <!--n:run:{path}:{spec}-->old<!--/n--> y\n")
    assert [(item.line, item.written, item.measured) for item in numbers.wrong_numbers(file, file.parent)] == [
        (1, "old", value)
    ]
    assert numbers.rewrite(file, file.parent)
    assert f"-->{value}<!--/n--> y" in file.read_text()
    assert numbers.wrong_numbers(file, file.parent) == []


@pytest.mark.parametrize(
    "text", ["<!--n:run:test.top3:.1%-->1%<!--/n-->", "<!--n:gone:a:d-->1<!--/n-->", "<!--n:run:test.top1:.1%-->93.5%"]
)
def test_unreadable_markers_are_reported(page, text):
    file = page(text)
    assert len(numbers.wrong_numbers(file, file.parent)) == 1


@pytest.mark.parametrize("text", ["reaches 93.5 %", "| 93% |", "1.10x as fast", "31.5 images/s"])
def test_typed_numbers_are_found(page, text):
    assert len(numbers.typed_numbers(page(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<!--n:run:test.top1:.1%-->93.5%<!--/n-->",
        "93.5 % <!--typed: the target-->",
        "`50%`",
        "```\n50%\n```",
        "3x3 pixels",
    ],
)
def test_markers_code_and_explained_numbers_may_stand(page, text):
    assert numbers.typed_numbers(page(text)) == []
