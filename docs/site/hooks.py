"""MkDocs hooks of the documentation site.

The home page and the changelog are made from README.md and CHANGELOG.md; the pages "Commands" and "Recipes" from the
command line's own help and from the recipes, so they are never out of date. In every page, links to files outside
docs/ become links to the repository, because the site does not contain them.
"""

import contextlib
import io
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import quote, unquote

from mkdocs.plugins import CombinedEvent, event_priority

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/patchword/patchword"
BRANCH = "main"
HELP_WIDTH = 100  # columns of the help pages
LOG = logging.getLogger("mkdocs.hooks")  # `mkdocs build --strict` fails if it gets a warning

# Pages that are made from files outside docs/.
SOURCES = {"index.md": "README.md", "index.ko.md": "README.ko.md", "changelog.md": "CHANGELOG.md"}
PAGES = {source: page for page, source in SOURCES.items()}
NOT_PUBLISHED = {"images/README.md"}  # as in exclude_docs of mkdocs.yml
KOREAN, KOREAN_ONLY = "ko", "ko/"  # the language, and the folder of pages that exist in no other
LANGUAGE_ROOTS = {"README.md": "", "README.ko.md": "ko/"}  # the URL of the home page in each language

# Code is matched first, so that nothing in it is taken for a link.
FENCED = r"^[ ]*(?P<fence>`{3,}|~{3,}).*?^[ ]*(?P=fence)[ ]*$"
CODE = rf"(?P<code>{FENCED}|(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`))"
LINK = r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)"
PICTURE = r"(?P<picture><picture>.*?</picture>)"
TAG = r"(?P<tag><(?:a|img|source|video)\b[^>]*>)"
NUMBER = r"<!--n:[^\n]+?-->(?P<number>.*?)<!--/n-->|<!--typed:[^\n]*?-->"
TOKEN = re.compile("|".join((CODE, PICTURE, TAG, NUMBER, LINK)), re.DOTALL | re.MULTILINE)
ATTRIBUTE = re.compile(r"""\b(href|src|srcset|poster)=(["'])(.*?)\2""")
DATE = re.compile(r"\d{4}-\d\d-\d\d")  # shown in one line
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|//|/|#", re.IGNORECASE)
DARK = re.compile(r"<source\b[^>]*prefers-color-scheme:\s*dark[^>]*>")
PATH_TEXT = re.compile(r"`?(?:\.\./)*(?:docs/)?[\w./-]+\.md`?")
SHELL = re.compile(
    r"^( *)```\n(?=\1(?:\$ |\w+=\S+ )*(?:patchword|pip|make|git|python3?|torchrun|docker|curl|cd) )", re.M
)
ITEM = re.compile(r"([-*+]|\d{1,9}[.)]) +(?=\S)")
FENCE = re.compile(r"`{3,}|~{3,}")

INLINE_CODE = re.compile(r"(?<!<pre><span></span>)<code>([^<]*)</code>")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
SEARCH_LABEL = re.compile(r"""class="md-search__input"[^>]*aria-label="([^"]*)\"""")
ALTERNATE = re.compile(r"""<link rel="?alternate"?[^>]*hreflang[^>]*>\s*""")

UrlOf = Callable[[str], str | None]  # the URL of a file of docs/, relative to the page that links to it


class Rewriter:
    """Rewrites the Markdown of one page.

    Attributes:
        source: The file that the text is from, as a path in the repository.
        page: The page that it becomes, as a path in docs/.
        url_of: Returns URLs for HTML tags, whose links MkDocs does not convert.
        titles: Titles of pages, by path in docs/. They replace link texts such as "docs/train.md".
        url: The URL of the page, relative to that of the site. README.md is also the home page of languages that have
            no README of their own.
    """

    def __init__(
        self, source: str, page: str, url_of: UrlOf, titles: dict[str, str] | None = None, url: str = ""
    ) -> None:
        self.source, self.page, self.url_of, self.titles, self.url = source, page, url_of, titles or {}, url

    def rewrite(self, text: str) -> str:
        """Rewrite links, image sources and markers of numbers, but no code."""
        return TOKEN.sub(self._replace, text)

    def _replace(self, match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        if match["picture"]:
            return self._two_images(match["picture"])
        if match["tag"]:
            return self._tag(match["tag"])
        if match["target"]:
            return self._link(match)
        number = match["number"] or ""
        return f'<span class="date">{number}</span>' if DATE.fullmatch(number) else number

    def _link(self, match: re.Match[str]) -> str:
        target, text = match["target"], match["text"]
        if match["image"] and is_remote(target):
            return ""  # a badge: the site makes no requests to other hosts
        if "](" in text:
            text = self.rewrite(text)
            if not text.strip():
                return ""
        file = repository_path(target, self.source)
        if file in LANGUAGE_ROOTS and self.source in LANGUAGE_ROOTS:
            return f'<a href="{language_url(file, self.url)}">{text}</a>'
        page = None if file is None else site_path(file)
        if page in self.titles and PATH_TEXT.fullmatch(text):
            text = self.titles[page]
        return f"{match['image']}[{text}]({self.markdown_target(target)}{match['title'] or ''})"

    def markdown_target(self, target: str) -> str:
        """Return the target of a Markdown link: a path relative to the page, or a URL in the repository."""
        file = repository_path(target, self.source)
        if file is None:
            return target
        page = site_path(file)
        if page is not None:
            return posixpath.relpath(page, posixpath.dirname(self.page) or ".") + fragment(target)
        return repository_url(file, target)

    def html_target(self, target: str) -> str:
        """Return the same for an HTML attribute: a URL relative to that of the page."""
        file = repository_path(target, self.source)
        if file is None:
            if not ABSOLUTE.match(target):
                LOG.warning("%s contains an HTML tag with %r, which does not exist.", self.source, target)
            return target
        if file in LANGUAGE_ROOTS and self.source in LANGUAGE_ROOTS:
            return language_url(file, self.url)
        page = site_path(file)
        if page is not None:
            return (self.url_of(page) or target.partition("#")[0]) + fragment(target)
        return repository_url(file, target)

    def _tag(self, tag: str) -> str:
        if tag.startswith(("<img", "<source", "<video")) and any(is_remote(m[3]) for m in ATTRIBUTE.finditer(tag)):
            return ""
        return ATTRIBUTE.sub(lambda m: f"{m[1]}={m[2]}{self.html_target(m[3])}{m[2]}", tag)

    def _two_images(self, element: str) -> str:
        """Replace `<picture>`, which follows the system, by two images of which Material shows one by its palette."""
        dark, image = DARK.search(element), re.search(r"<img\b[^>]*>", element)
        if image is None:
            return ""
        light = self._tag(image[0])
        dark_source = ATTRIBUTE.search(self._tag(dark[0])) if dark else None
        if dark_source is None or not light:
            return light
        source = re.compile(r"""\bsrc=(["'])(.*?)\1""")
        return source.sub(r'src="\2#only-light"', light) + source.sub(f'src="{dark_source[3]}#only-dark"', light)


def is_remote(target: str) -> bool:
    """Whether a target is on another host."""
    return target.startswith(("http:", "https:", "//"))


def repository_path(target: str, source: str) -> str | None:
    """Return the path in the repository that a link names; None for URLs, anchors, and files that do not exist."""
    if ABSOLUTE.match(target):
        return None
    path = unquote(target.partition("#")[0].partition("?")[0])
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    return path if path in PAGES or (ROOT / path).exists() else None


def site_path(file: str) -> str | None:
    """Return the path in docs/ of a file that the site contains; None for other files of the repository.

    A translation has the path of the page that it translates: the i18n plugin chooses between them.
    """
    inside = PAGES.get(file, file.removeprefix("docs/"))
    is_file = inside != file and (ROOT / file).is_file()
    if not is_file or inside.endswith(".py") or inside in NOT_PUBLISHED:
        return None
    return re.sub(rf"\.{KOREAN}\.md$", ".md", inside)


def fragment(target: str) -> str:
    """Return the anchor of a link, with its #."""
    return "".join(target.partition("#")[1:])


def repository_url(file: str, target: str) -> str:
    """Return the URL of a file or directory in the repository."""
    kind = "tree" if (ROOT / file).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/{BRANCH}/{quote(file)}{fragment(target)}"


def language_url(file: str, url: str) -> str:
    """Return the URL of the home page of a language, relative to the URL of another page."""
    return posixpath.relpath(LANGUAGE_ROOTS[file] or ".", url or ".") + "/"


def strip_empty_links(text: str) -> str:
    """Remove HTML links that had nothing but a badge."""
    return re.sub(r"<a\b[^>]*\bhref=[^>]*>\s*</a>", "", text)


def mark_shell(text: str) -> str:
    """Name the language of code blocks that start with a shell command, for the highlighting of their comments."""
    return SHELL.sub(r"\1```bash\n", text)


def indent_lists(text: str) -> str:
    """Indent what belongs to list items by four spaces, and separate lists by blank lines.

    Python-Markdown needs this; GitHub accepts it, but also the usual two or three spaces.
    """
    lines: list[str] = []
    items: list[int] = []  # for each open item, the column where its content starts
    fence, fence_indent, in_paragraph = "", 0, False
    for line in text.splitlines():
        content = line.lstrip(" ")
        indent = len(line) - len(content)
        if not content:
            lines.append("")
            in_paragraph = False
            continue
        item = None if fence else ITEM.match(content)
        starts_fence = None if fence else FENCE.match(content)
        was_in_list = bool(items)
        if not fence and (item or starts_fence or not in_paragraph):
            while items and indent < items[-1]:
                items.pop()
        if item and in_paragraph and (not was_in_list or lines[-1].lstrip().startswith(("`" * 3, "~" * 3))):
            lines.append("")
        outer = fence_indent if fence else items[-1] if items else 0
        inner = max(0, indent - outer)
        if item or (items and not fence and inner < 4):  # fewer than four spaces have no meaning
            inner = 0
        lines.append(" " * (4 * len(items) + inner) + content)
        if item:
            items.append(indent + item.end())
        if fence and content.rstrip() == fence:
            fence = ""
        elif starts_fence:
            fence, fence_indent = starts_fence[0], indent
        in_paragraph = True
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return the page "Commands": the overview, each command with every option, and the exit codes."""
    from patchword.cli import main as cli
    from patchword.cli.help_pages import GROUPS

    listed = [name for commands in GROUPS.values() for name in commands]
    assert sorted(listed) == sorted(cli.COMMANDS), "help_pages.GROUPS and cli.main.COMMANDS differ"
    parts = [
        "# Commands",
        "This page is the output of `patchword help` and of `patchword COMMAND --help-all`.",
        code_block(printed_help([])),
    ]
    for title, commands in GROUPS.items():
        parts.append(f"## {title}")
        for name, summary in commands.items():
            sentence = summary[:1].upper() + summary[1:]
            parts += [f"### {name}", f"{sentence}.", code_block(printed_help([name, "--help-all"]))]
    rows = [f"| {code} | {meaning} |" for code, meaning in exit_codes(cli.__doc__ or "").items()]
    parts += ["## Exit codes", "\n".join(["| code | meaning |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def exit_codes(docstring: str) -> dict[str, str]:
    """Return the exit codes that the docstring of `patchword.cli.main` lists."""
    codes: dict[str, str] = {}
    for line in docstring.partition("Exit codes:\n")[2].splitlines():
        code, _, meaning = line.strip().partition("  ")
        if meaning:
            codes[code] = meaning.strip()
        elif codes:
            codes[next(reversed(codes))] += f" {code}"
    assert "0" in codes, "the docstring of patchword.cli.main has no exit codes"
    return {code: meaning.strip().replace("|", "\\|") for code, meaning in codes.items()}


def printed_help(words: list[str]) -> str:
    """Return what the command line prints for `words`, at a fixed width and without colors."""
    from patchword.cli import main as cli

    printed = io.StringIO()
    fixed = {"COLUMNS": str(HELP_WIDTH), "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, fixed), contextlib.redirect_stdout(printed):
        code = cli.run_command(words)
    assert code == 0, f"patchword {' '.join(words)} failed"
    return printed.getvalue().rstrip()


def recipes_page() -> str:
    """Return the page "Recipes": what each built-in recipe does and reaches, and its source."""
    from patchword import recipes

    parts = [
        "# Recipes",
        "A recipe is a Python file that sets `config`. `patchword recipes` prints the list, and "
        "[Train on your images](../train.md) explains how to change a recipe or write your own. Any field of a recipe "
        "is also a flag of [`patchword train`](commands.md#train).",
    ]
    for name in recipes.RECIPES:
        facts = recipes.describe_recipe(name)
        parts += [f"## {name}", facts["summary"]]
        parts.append(
            "\n".join(f"- {title.title()}: {fact(title, facts[title])}" for title in list(facts)[1:] if facts[title])
        )
        parts.append(code_block((recipes.FOLDER / f"{name}.py").read_text(encoding="utf-8").rstrip(), "python"))
    return "\n\n".join(part for part in parts if part) + "\n"


def fact(title: str, text: str) -> str:
    """Return a fact about a recipe; a command is code."""
    return f"`{text}`" if title == "command" else text


def code_block(text: str, language: str = "{ .text .wide }") -> str:
    """Return a fenced code block; by default plain text of up to 100 columns."""
    return f"```{language}\n{text}\n```"


def exception_tree() -> str:
    """Return the tree of exceptions as the docstring of `patchword.errors` draws it."""
    from patchword import errors

    lines = [line for line in (errors.__doc__ or "").splitlines() if re.match(r"PatchwordError|[├│└]", line)]
    assert len(lines) > 5, "the docstring of patchword.errors has no tree"
    return "\n".join(lines)


GENERATED: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "reference/recipes.md": recipes_page,
}
INSERTED: dict[str, Callable[[], str]] = {"exception tree": lambda: code_block(exception_tree())}


def generated_pages() -> list[str]:
    """List the pages that have no file in docs/."""
    copied = [page for page, source in SOURCES.items() if (ROOT / source).is_file()]
    return [*copied, *GENERATED]


def nav_titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield path and title of every page of the navigation."""
    for item in nav if isinstance(nav, list) else []:
        for title, value in item.items() if isinstance(item, dict) else ():
            if isinstance(value, str):
                yield value, title
            else:
                yield from nav_titles(value)


def expand_nav(nav: Any) -> Any:
    """Replace patterns such as decisions/0*.md in the navigation by the pages that match."""
    if isinstance(nav, dict):
        return {title: expand_nav(value) for title, value in nav.items()}
    if not isinstance(nav, list):
        return nav
    expanded: list[Any] = []
    for item in nav:
        if isinstance(item, str) and "*" in item:
            files = sorted((ROOT / "docs").glob(item))
            expanded += [file.relative_to(ROOT / "docs").as_posix() for file in files if file.suffixes == [".md"]]
        else:
            expanded.append(expand_nav(item))
    return expanded


def translated_titles(config: "MkDocsConfig", page: str) -> dict[str, str]:
    """Return the titles of all pages in the language of a page."""
    titles = dict(nav_titles(config.nav))
    languages = config.plugins["i18n"].config.languages if "i18n" in config.plugins else []
    for language in languages:
        if page.endswith(f".{language.locale}.md"):
            words = language.nav_translations or {}
            return {path: words.get(title, title) for path, title in titles.items()}
    return titles


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """List the pages of patterns in the navigation, and make anchors like GitHub's, so that links work in both."""
    from pymdownx.slugs import slugify

    config.nav = expand_nav(config.nav)
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def add_generated_pages(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages; `on_page_read_source` supplies their text."""
    from mkdocs.structure.files import File

    # Not File.generated: the i18n plugin accepts only pages with a path in docs/, and makes new File objects.
    for page in generated_pages():
        files.append(File(page, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


@event_priority(-200)  # after the i18n plugin, which puts the pages of a language into a directory of its own
def place_korean_pages(files: "Files", config: "MkDocsConfig") -> "Files":
    """Give the pages that exist in Korean only one URL: that of the default language.

    The i18n plugin would build them twice, in English and below ko/ko/. At one URL, the Korean build, which comes
    later, replaces the English one; the navigation and the links of English pages lead there, too.
    """
    i18n = config.plugins["i18n"]
    is_korean = i18n.current_language == KOREAN
    for file in files.documentation_pages():
        if file.src_uri.startswith(KOREAN_ONLY):
            if is_korean:
                file.dest_uri = file.dest_uri.removeprefix(f"{KOREAN}/")
                file.url = file.url.removeprefix(f"{KOREAN}/")
                file.abs_dest_path = os.path.join(config.site_dir, file.dest_uri)
            file.alternates = {KOREAN: file}
    if not is_korean:  # the sitemap lists them once
        pages = i18n.i18n_files_per_language[i18n.current_language]
        pages[:] = [file for file in pages if not file.src_uri.startswith(KOREAN_ONLY)]
    return files


on_files = CombinedEvent(add_generated_pages, place_korean_pages)


def on_page_read_source(page: "Page", config: "MkDocsConfig") -> str | None:
    """Return the text of a generated page; None lets MkDocs read the file."""
    path = page.file.src_uri
    if path in GENERATED:
        return GENERATED[path]()
    return (ROOT / SOURCES[path]).read_text(encoding="utf-8") if path in SOURCES else None


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Rewrite the links of a page."""
    path = page.file.src_uri
    if path.startswith(KOREAN_ONLY) and config.plugins["i18n"].current_language != KOREAN:
        page.meta["search"] = {"exclude": True}  # the Korean build indexes it
    top_level = [value for item in config.nav or [] for value in item.values() if isinstance(value, str)]
    if re.sub(r"\.\w\w\.md$", ".md", path) in top_level:
        page.meta.setdefault("hide", ["navigation"])  # the sidebar would have one entry

    def url_of(target: str) -> str | None:
        file = files.get_file_from_path(target)
        return None if file is None else file.url_relative_to(page.file)

    for name, content in INSERTED.items():
        markdown = markdown.replace(f"<!-- insert: {name} -->", content())
    if path in GENERATED:
        return markdown
    source, titles = SOURCES.get(path, f"docs/{path}"), translated_titles(config, path)
    rewriter = Rewriter(source, path, url_of, titles, page.url)
    return mark_shell(indent_lists(strip_empty_links(rewriter.rewrite(markdown))))


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Keep flags in inline code in one line; browsers break lines after hyphens."""
    return INLINE_CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


def on_post_page(output: str, page: "Page", config: "MkDocsConfig") -> str:
    """Fix what Material writes around the content."""
    return fix_theme(output)


def on_post_template(output_content: str, template_name: str, config: "MkDocsConfig") -> str:
    """Do the same for the page of missing pages."""
    return fix_theme(output_content) if template_name == "404.html" else output_content


def fix_theme(html: str) -> str:
    """Name the search dialog for screen readers, and remove the links to translations from the head.

    Material would request a sitemap next to each translation, in vain; sitemap.xml lists them for search engines.
    """
    label = SEARCH_LABEL.search(html)
    name = f'role="dialog" aria-label="{label[1]}"' if label else 'role="dialog"'
    return ALTERNATE.sub("", html).replace('role="dialog"', name, 1)
