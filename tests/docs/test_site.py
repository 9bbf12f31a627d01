"""The documentation site: what the hooks generate and rewrite, a strict build, and every page in a real browser."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

import patchword as pw
from helpers.browser import BROWSER, FLAGS
from helpers.load_script import load_script
from patchword import inspection
from patchword.cli import main as cli
from patchword.recipes import RECIPES

ROOT = Path(__file__).parents[2]
hooks = load_script("docs/site/hooks.py")

PREFIX = "patchword"  # the site's path on its host, from site_url
BLOB, TREE = f"{hooks.REPOSITORY}/blob/main", f"{hooks.REPOSITORY}/tree/main"
# Pages with long code, wide tables, figures, API signatures and help.
REPRESENTATIVE = ["", "train/", "benchmarks/", "studies/", "api/training/", "reference/recipes/"]
ADMONITIONS = "".join(
    f'<div class="admonition {kind}"><p class="admonition-title">{kind}</p><code>x</code> <a href="#x">x</a></div>'
    for kind in ("note", "tip", "warning", "danger")
)


def rewrite(text: str, source: str = "README.md", page: str = "index.md", **options: Any) -> str:
    return hooks.Rewriter(source, page, lambda path: f"URL/{path}", **options).rewrite(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/train.md)", "[a](train.md)"),
        ("[a](docs/get-started.ko.md)", "[a](get-started.md)"),
        ("[a](docs/train.md#from-python)", "[a](train.md#from-python)"),
        ("[a](docs/decisions/README.md)", "[a](decisions/README.md)"),
        ("![a](docs/curves.svg)", "![a](curves.svg)"),
        ("[a](CHANGELOG.md)", "[a](changelog.md)"),
        ("[a](LOG.md)", f"[a]({BLOB}/LOG.md)"),
        ("[a](results)", f"[a]({TREE}/results)"),
        ("[`a`](src/patchword/models/vit.py)", f"[`a`]({BLOB}/src/patchword/models/vit.py)"),
        ("[a](docs/fill_numbers.py)", f"[a]({BLOB}/docs/fill_numbers.py)"),
        ("[a](#install) [b](https://arxiv.org/abs/2010.11929)", "[a](#install) [b](https://arxiv.org/abs/2010.11929)"),
        ("[a](docs/no-such-page.md)", "[a](docs/no-such-page.md)"),  # MkDocs warns about it
        ('<p><img src="docs/curves.svg" width="9"></p>', '<p><img src="URL/curves.svg" width="9"></p>'),
        ('<a href="docs/train.md#x">a</a>', '<a href="URL/train.md#x">a</a>'),
        ('<a href="LOG.md">a</a>', f'<a href="{BLOB}/LOG.md">a</a>'),
        ("[![a](https://img.example/b.svg)](LICENSE) b", " b"),
        ('<img src="https://img.example/b.svg"> b', " b"),
        ('<a href="README.ko.md">a</a> [b](README.ko.md)', '<a href="ko/">a</a> <a href="ko/">b</a>'),
        ('<a id="a"></a><a href="LICENSE"></a>', '<a id="a"></a>'),
        ("`[a](docs/train.md)`", "`[a](docs/train.md)`"),
        ("```\n[a](docs/train.md)\n```", "```\n[a](docs/train.md)\n```"),
        ("x <!--n:engines:rows.0.a:.1f-->2.5<!--/n--> y", "x 2.5 y"),
        ("1 % <!--typed: published elsewhere-->", "1 % "),
        ("<!--n:a:date:-->2026-11-17<!--/n-->", '<span class="date">2026-11-17</span>'),
    ],
)  # fmt: skip
def test_links_of_readme(text: str, expected: str) -> None:
    assert hooks.strip_empty_links(rewrite(text)) == expected


def test_links_of_pages() -> None:
    assert rewrite("[a](../LOG.md)", "docs/engines.md", "engines.md") == f"[a]({BLOB}/LOG.md)"
    assert rewrite("[a](../upgrading.md)", "docs/decisions/x.md", "decisions/x.md") == "[a](../upgrading.md)"
    assert rewrite("[a](../README.md)", "docs/train.md", "train.md") == "[a](index.md)"
    assert rewrite("[a](README.md)", "README.ko.md", "index.ko.md", url="ko/") == '<a href="../">a</a>'
    assert (
        rewrite("[a](README.ko.md)", "README.md", "index.md", url="ko/") == '<a href="./">a</a>'
    )  # not translated yet


def test_titles_replace_paths_as_link_texts() -> None:
    titles = {"train.md": "Train on your images"}
    assert rewrite("[docs/train.md](docs/train.md)", titles=titles) == "[Train on your images](train.md)"
    assert rewrite("[the guide](docs/train.md)", titles=titles) == "[the guide](train.md)"


def test_images_for_two_schemes() -> None:
    text = """<picture>
  <source srcset="docs/curves.svg" media="(prefers-color-scheme: dark)">
  <img src="docs/crossing.svg" alt="Curves">
</picture>"""
    light = '<img src="URL/crossing.svg#only-light" alt="Curves">'
    assert rewrite(text) == light + '<img src="URL/curves.svg#only-dark" alt="Curves">'


def test_broken_html_image_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rewrite('<img src="docs/images/no-such-image.png">')
    assert "no-such-image.png" in caplog.text


def test_lists_are_indented_for_python_markdown() -> None:
    text = "Text:\n- a\n  b\n  - c\n- d\n\n  ```\n  - no item\n  ```\n- e\n\nText\n"
    expected = "Text:\n\n- a\n    b\n    - c\n- d\n\n    ```\n    - no item\n    ```\n\n- e\n\nText\n"
    assert hooks.indent_lists(text) == expected
    numbered = "1. a\n\n   b\n2. c\n"
    assert hooks.indent_lists(numbered) == "1. a\n\n    b\n2. c\n"
    assert hooks.indent_lists(expected) == expected


def test_shell_blocks_are_named() -> None:
    assert hooks.mark_shell("```\npatchword train photos/\n```") == "```bash\npatchword train photos/\n```"
    assert hooks.mark_shell("- a\n\n    ```\n    make docs\n") == "- a\n\n    ```bash\n    make docs\n"
    assert hooks.mark_shell("```\nsrc/patchword/\n```") == "```\nsrc/patchword/\n```"


def test_page_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    page = hooks.commands_page()
    for name in cli.COMMANDS:
        assert f"\n### {name}\n" in page
        assert f"usage: patchword {name}" in page
    assert "--optim.head-lr-scale" in page
    assert "stopped by signal N" in page
    monkeypatch.setenv("COLUMNS", "40")
    assert hooks.commands_page() == page


def test_page_of_recipes() -> None:
    page = hooks.recipes_page()
    for name in RECIPES:
        assert f"\n## {name}\n" in page
        assert (ROOT / f"src/patchword/recipes/{name}.py").read_text().strip() in page


def documented_names() -> list[str]:
    text = "\n".join(file.read_text() for file in sorted((ROOT / "docs/api").glob("*.md")))
    blocks = re.findall(r"^::: (\S+)\n(?:    options:\n(?:      heading: (\S+)\n)?)?", text, re.MULTILINE)
    return [heading or name for name, heading in blocks]


def test_api_reference_has_every_public_name_once() -> None:
    names = documented_names()
    assert sorted(names) == sorted(set(names))
    assert {f"patchword.{name}" for name in pw.__all__} <= set(names)
    assert {f"patchword.inspection.{name}" for name in inspection.__all__} <= set(names)
    overview = (ROOT / "docs/api/index.md").read_text()
    assert [name for name in pw.__all__ if f"`{name}`" not in overview] == []


def test_api_reference_has_every_error() -> None:
    classes = [
        node.name
        for node in ast.parse((ROOT / "src/patchword/errors.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    documented = {name.rpartition(".")[2] for name in documented_names()}
    assert set(classes) <= documented
    assert "ImageError" in hooks.exception_tree()


def test_api_reference_has_the_values_of_config_fields() -> None:
    for module in ("model", "train"):
        source = (ROOT / f"src/patchword/config/{module}.py").read_text()
        for name in re.findall(r"^(\w+) = Literal\[", source, re.MULTILINE):
            assert f"patchword.config.{module}.{name}" in documented_names()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site") / PREFIX
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


class Links(HTMLParser):
    """The targets and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        self.targets += [value for name in ("href", "src") if (value := found.get(name))]


def page_paths(site: Path) -> list[str]:
    """The URLs of all pages, relative to the home page."""
    return sorted(str(file.parent.relative_to(site)).removeprefix(".") for file in site.rglob("index.html"))


@pytest.mark.slow
def test_internal_links_resolve(site: Path) -> None:
    pages = {
        f"/{PREFIX}/{path}/".replace("//", "/"): Links((site / path / "index.html").read_text())
        for path in page_paths(site)
    }
    assert len(pages) > 80
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            url, anchor = urldefrag(urljoin(f"https://host{page}", target))
            path = unquote(urlsplit(url).path)
            if urlsplit(url).netloc != "host":
                continue
            if path in pages:
                is_found = unquote(anchor) in pages[path].ids
            else:
                is_found = (site / path.removeprefix(f"/{PREFIX}/")).is_file()
            if not is_found:
                broken.append(f"{page}: {target}")
    assert broken == []


@pytest.mark.slow
def test_markdown_is_rendered(site: Path) -> None:
    """GitHub accepts more than Python-Markdown does; no list, link or marker of a number is left as text."""
    raw = []
    for path in page_paths(site):
        article = re.search(r"<article.*?</article>", (site / path / "index.html").read_text(), re.DOTALL)
        assert article, path
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article[0], flags=re.DOTALL)
        raw += [
            f"{path}: {found}" for found in re.findall(r"<p>[^<]*\n(?:[-*] |\d+\. )|\*\*\w|\]\(|<!--n:|^:::.*", text)
        ]
    assert raw == []


@pytest.mark.slow
def test_generated_pages_and_fields_are_in_the_site(site: Path) -> None:
    assert "patchword quickstart" in (site / "index.html").read_text()
    assert "Unreleased" in (site / "changelog/index.html").read_text()
    configuration = (site / "api/configuration/index.html").read_text()
    assert 'id="patchword.OptimConfig.lr"' in configuration
    assert "Peak learning rate" in configuration
    modules = [path for path in page_paths(site) if "doc-module" in (site / path / "index.html").read_text()]
    assert modules == []  # a module with the name of its function
    korean = (site / "ko/train/index.html").read_text()
    assert 'lang="ko"' in korean
    assert "가이드" in korean


@pytest.mark.slow
def test_pages_that_are_korean_only_have_one_url(site: Path) -> None:
    sources = sorted(file.stem for file in (ROOT / "docs/ko").glob("*.md"))
    assert sources
    built = [path for path in page_paths(site) if Path(path).name in sources]
    assert built == [f"ko/{name}" for name in sources]
    locations = re.findall("<loc>(.*?)</loc>", (site / "sitemap.xml").read_text())
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    for path in built:
        page = (site / path / "index.html").read_text()
        assert '<html lang="ko"' in page
        assert "가이드" in page, "the navigation is Korean, too"
        assert sum(location.endswith(f"/{path}/") for location in locations) == 1
        assert sum(entry["location"] == f"{path}/" for entry in entries) == 1
    links = Links((site / built[0] / "index.html").read_text()).targets
    urls = {urljoin(f"https://host/{PREFIX}/{built[0]}/", link) for link in links}
    assert f"https://host/{PREFIX}/ko/get-started/" in urls
    assert f"https://host/{PREFIX}/" in urls, "of the language menu: there is no English page"
    assert f"../{built[0]}/" in Links((site / "lineage/index.html").read_text()).targets


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    """The URL of the home page on a local server."""
    handler = functools.partial(QuietHandler, directory=str(site.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{PREFIX}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if BROWSER is None:
        pytest.skip("needs a Chromium on the PATH (Debian: apt install chromium)")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def problems() -> list[str]:
    return []


def open_page(browser: Any, url: str, problems: list[str], **options: Any) -> Any:
    """A page that records console messages, errors, failed responses and requests to other hosts."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(60_000)
    host = url.removesuffix(f"{PREFIX}/")

    def note(kind: str, text: str) -> None:
        problems.append(f"{page.url} {kind}: {text}")

    page.on(
        "console", lambda message: note(message.type, message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: note("error", str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith((host, "data:", "blob:")) else note("request", request.url),
    )
    page.on("response", lambda response: note("response", response.url) if response.status >= 400 else None)
    return page


def is_translated(path: str) -> bool:
    return any(
        (ROOT / "docs" / name).exists() for name in (f"{path}.ko.md", f"{path}/README.ko.md", f"{path}/index.ko.md")
    )


@pytest.mark.slow
def test_every_page_in_a_browser(browser: Any, site: Path, url: str, problems: list[str]) -> None:
    """No errors, no request to another host, no broken image, no horizontal scroll on a phone."""
    page = open_page(browser, url, problems, viewport={"width": 390, "height": 800})
    for path in [*page_paths(site), "404.html"]:
        is_korean = (ROOT / f"docs/{path}.md").is_file() or is_translated(path.removeprefix("ko/"))
        if path.startswith("ko/") and not is_korean:
            continue  # the same page in English
        page.goto(f"{url}{path}")
        state = page.evaluate("""async () => {
          const root = document.documentElement, images = [...document.images];
          for (const image of images) image.loading = "eager";
          await Promise.all(images.map(image => image.decode().catch(() => 0)));
          return {broken: images.filter(image => !image.naturalWidth).map(image => image.src),
                  overflow: root.scrollWidth - root.clientWidth}; }""")
        if state["broken"] or state["overflow"] > 0:
            problems.append(f"{path}: {state}")
    page.context.close()
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Any, url: str, problems: list[str], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = open_page(browser, url, problems, viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    for path in REPRESENTATIVE:
        page.goto(f"{url}{path}")
        assert page.get_attribute("body", "data-md-color-scheme") == ("default" if scheme == "light" else "slate")
        if path == "train/":
            page.evaluate(
                "html => document.querySelector('article').insertAdjacentHTML('beforeend', html)", ADMONITIONS
            )
        problems += severe_violations(axe, page)
    search(page, "attention")
    problems += severe_violations(axe, page)
    page.context.close()
    assert problems == []


def search(page: Any, words: str) -> None:
    """Open the search and wait for its results."""
    page.click("label.md-search__icon[for=__search]:visible, input.md-search__input:visible")
    page.locator("input.md-search__input").press_sequentially(words)  # it listens to keys
    page.wait_for_selector(".md-search-result__item")


def severe_violations(axe: Any, page: Any) -> list[str]:
    violations = axe.run(page).response["violations"]
    severe = [v for v in violations if v["impact"] in ("serious", "critical")]
    return [f"{page.url} {v['id']}: {node['html'][:200]}" for v in severe for node in v["nodes"]]


@pytest.mark.slow
def test_search_finds_pages(browser: Any, url: str, problems: list[str]) -> None:
    page = open_page(browser, url, problems, viewport={"width": 1280, "height": 800})
    page.goto(url)
    search(page, "attention_maps")
    links = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    assert any("api/inspection/" in link for link in links)
    page.context.close()
    assert problems == []
