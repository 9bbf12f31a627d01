"""The Korean pages have the code, images, links and numbers of the English ones."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KOREAN_PAGES = ("README.ko.md", "docs/get-started.ko.md")
LANGUAGE_LINKS = {"README.md", "README.ko.md"}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(^|\s)# .*$", re.MULTILINE)
COMMENTED_LANGUAGES = ("", "bash", "python")  # in ```text, "# " is output
INLINE_CODE = re.compile(r"`([^`\n]+)`")
IMAGE = re.compile(r'<img\b[^>]*\bsrc="([^"]+)"|!\[[^\]]*\]\(([^)\s]+)\)')
LINK = re.compile(r'(?<!!)\[[^\[\]]*\]\(([^)\s]+)\)|<a\b[^>]*\bhref="([^"]+)"')
MARKER = re.compile(r"<!--(?:n:.*?-->.*?<!--/n|typed:.*?)-->")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

both_pages = pytest.mark.parametrize(
    ("english", "korean"),
    [
        pytest.param((ROOT / name.replace(".ko.md", ".md")).read_text(encoding="utf-8"), text, id=name)
        for name in KOREAN_PAGES
        for text in [(ROOT / name).read_text(encoding="utf-8")]
    ],
)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block, without comments."""
    return [
        (language, COMMENT.sub("", block) if language in COMMENTED_LANGUAGES else block)
        for language, block in FENCED.findall(text)
    ]


def prose(text: str) -> str:
    return FENCED.sub("", text)


def inline_code(text: str) -> Counter[str]:
    return Counter(INLINE_CODE.findall(prose(text)))


def image_sources(text: str) -> list[str]:
    return [html or markdown for html, markdown in IMAGE.findall(prose(text))]


def link_targets(text: str) -> list[str]:
    return [markdown or html for markdown, html in LINK.findall(prose(text))]


def links_to_pages(text: str) -> Counter[str]:
    """Link targets with how often each occurs, without anchors in the page and links to the other language."""
    return Counter(
        target for target in link_targets(text) if not target.startswith("#") and target not in LANGUAGE_LINKS
    )


def anchors_in_page(text: str) -> list[str]:
    return [target for target in link_targets(text) if target.startswith("#")]


def heading_anchors(text: str) -> list[str]:
    """Anchors of the headings, made as GitHub makes them."""
    titles = [title.strip().lower() for title in HEADING.findall(prose(text))]
    return ["#" + re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]


@both_pages
def test_code_blocks_differ_only_in_comments(english: str, korean: str) -> None:
    assert fenced_blocks(korean) == fenced_blocks(english)
    assert fenced_blocks(english)


@both_pages
def test_commands_and_names_in_the_text_are_the_same(english: str, korean: str) -> None:
    assert inline_code(korean) == inline_code(english)


@both_pages
def test_images_are_the_same(english: str, korean: str) -> None:
    assert image_sources(korean) == image_sources(english)


@both_pages
def test_links_lead_to_the_same_pages(english: str, korean: str) -> None:
    assert links_to_pages(korean) == links_to_pages(english)
    assert links_to_pages(english)


@both_pages
def test_numbers_are_the_same(english: str, korean: str) -> None:
    assert Counter(MARKER.findall(korean)) == Counter(MARKER.findall(english))
    assert MARKER.findall(english)


@both_pages
def test_anchors_match_the_headings(english: str, korean: str) -> None:
    assert len(anchors_in_page(korean)) == len(anchors_in_page(english))
    for text in (english, korean):
        assert not set(anchors_in_page(text)) - set(heading_anchors(text))


@pytest.mark.parametrize("name", KOREAN_PAGES)
def test_linked_files_exist(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    for target in [*link_targets(text), *image_sources(text)]:
        if not target.startswith(("#", "https://")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", sorted((ROOT / "docs/ko").glob("*.md")), ids=lambda page: page.stem)
def test_the_tutorial_links_to_korean_pages_or_says_that_they_are_english(page: Path) -> None:
    for label, target in re.findall(r"(?<!!)\[([^\[\]]*)\]\((\.\./[^)#\s]+\.md)", page.read_text(encoding="utf-8")):
        linked = (page.parent / target).resolve()
        assert linked.is_file(), target
        if not linked.name.endswith(".ko.md"):
            assert not linked.with_suffix(".ko.md").exists(), f"{target} is translated"
            assert label.endswith("(영어)"), label


def test_readmes_link_to_each_other() -> None:
    assert '<a href="README.md">English</a> · 한국어' in (ROOT / "README.ko.md").read_text(encoding="utf-8")
    assert 'English · <a href="README.ko.md">한국어</a>' in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_changed_command_is_found_but_a_changed_comment_is_not() -> None:
    english = "```\npatchword train photos/   # ten minutes\n```\n"
    assert fenced_blocks(english.replace("ten minutes", "10분")) == fenced_blocks(english)
    assert fenced_blocks(english.replace("photos", "사진")) != fenced_blocks(english)


def test_anchors_are_those_of_github() -> None:
    text = "## 1. 설치\n### Which model?\n```\n# no heading\n```\n"
    assert heading_anchors(text) == ["#1-설치", "#which-model"]
