"""Metadata of the project, CITATION.cff, issue forms, messages, and the README as a package index shows it."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import patchword
from helpers.load_script import load_script
from patchword.errors import DOCS_URL

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PAGES = [ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", ".github/PULL_REQUEST_TEMPLATE.md")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REF = "v0.0.0"
links = load_script("docs/absolute_links.py")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def file_id(path: Path) -> str:
    return path.name


def test_citation() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "type", "license", "version"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["type"]) == ("patchword", "software")
    assert citation["version"] == patchword.__version__
    assert citation["license"] == PROJECT["license"]
    assert ("date-released" in citation) == (".dev" not in patchword.__version__)
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    (paper,) = citation["references"]
    assert {"type", "title", "authors"} <= paper.keys()
    assert paper["identifiers"][0]["value"] == "arXiv:2010.11929"


def test_urls() -> None:
    urls = PROJECT["urls"]
    assert urls["Homepage"] == urls["Documentation"] == DOCS_URL
    assert urls["Repository"] == links.REPOSITORY
    assert urls["Changelog"].startswith(links.REPOSITORY)
    assert urls["Issues"].startswith(links.REPOSITORY)


def test_classifiers_agree_with_the_other_fields() -> None:
    classifiers = PROJECT["classifiers"]
    assert not [name for name in classifiers if name.startswith("License ::")]  # `license` is an SPDX expression
    assert "Typing :: Typed" in classifiers
    assert (ROOT / "src/patchword/py.typed").is_file()
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {minimum}" in classifiers


@pytest.mark.parametrize("path", FORMS, ids=file_id)
def test_issue_forms(path: Path) -> None:
    form = read_yaml(path)
    if path.name == "config.yml":
        assert all(link["url"].startswith("https://") for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= form.keys()
    identifiers = [field["id"] for field in form["body"]]
    assert len(identifiers) == len(set(identifiers))
    for field in form["body"]:
        assert field["type"] in ("input", "textarea")
        assert field["attributes"]["label"]
        assert isinstance(field["validations"]["required"], bool)


def test_bug_reports_include_the_doctor() -> None:
    assert "patchword doctor --json" in (ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=file_id)
def test_workflows_declare_their_permissions(path: Path) -> None:
    """Without `permissions`, a workflow gets the defaults of the repository, which may include write access."""
    workflow = read_yaml(path)
    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert "contents" not in job.get("permissions", {})
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


@pytest.mark.parametrize("page", PAGES, ids=file_id)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_readme_of_a_release_has_no_relative_links() -> None:
    text = links.make_absolute((ROOT / "README.md").read_text(encoding="utf-8"), REF)
    targets = [match["target"] for part in links.CODE.split(text)[::2] for match in links.TARGET.finditer(part)]
    assert len(targets) >= 10
    assert not [target for target in targets if not target.startswith("https://")]
    own = [re.fullmatch(rf"{re.escape(base)}/(?:(?:blob|tree)/)?{REF}/([^#]+)(?:#.*)?", target)
           for target in targets for base in (links.REPOSITORY, links.RAW) if f"/{REF}/" in target]  # fmt: skip
    paths = [match[1] for match in own if match]
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert links.make_absolute(text, REF) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/train.md#b)", "[a](https://github.com/patchword/patchword/blob/v0.0.0/docs/train.md#b)"),
        ("[`a`](docs)", "[`a`](https://github.com/patchword/patchword/tree/v0.0.0/docs)"),
        ("[a](#b)", "[a](https://github.com/patchword/patchword/blob/v0.0.0/README.md#b)"),
        ("![a](docs/a.png)", "![a](https://raw.githubusercontent.com/patchword/patchword/v0.0.0/docs/a.png)"),
        ('<img src="docs/a.png">', '<img src="https://raw.githubusercontent.com/patchword/patchword/v0.0.0/docs/a.png">'),
        ("[a]: docs/train.md", "[a]: https://github.com/patchword/patchword/blob/v0.0.0/docs/train.md"),
        ("[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("`[a](docs)` and\n```\n[a](docs)\n```\n", "`[a](docs)` and\n```\n[a](docs)\n```\n"),
    ],
)  # fmt: skip
def test_absolute_links(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/train.md", "docs/a.png"):
        (tmp_path / name).touch()
    assert links.make_absolute(text, REF, tmp_path) == expected


def test_links_to_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        links.make_absolute("[a](docs/gone.md)", REF, tmp_path)


def test_messages_name_no_file_of_the_documentation() -> None:
    """A wheel has no documentation: messages link to pages of the website."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.search(r"\bdocs/\w+\.md", text):
                found.append(f"{path.name}:{node.lineno}")
    assert not found
