"""The architecture: import direction, sizes, docstrings, vocabulary, public names, versions.

docs/architecture.md explains the rules that these tests enforce.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import patchword as pw

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/patchword"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_VIT_LINES = 200

# Lowest first; a package may import only from packages below it.
LAYERS = (
    *("errors", "core", "config", "recipes", "models", "data", "checkpoints", "engines", "inference", "metrics"),
    *("evaluation", "inspection", "plots", "report", "training", "lineage", "doctor", "studies", "cluster", "serve"),
    "cli",
)

# Words that this project does not use, with what it says instead (matched as whole words, ignoring case).
REPLACED_WORDS = {
    r"pictures?": "image",
    r"answers?|answered|answering": "prediction, output, logits or response",
    r"from nothing": "from scratch",
    r"by heart": "overfitted",
    r"learnt": "learned",
    r"mirror images?": "horizontal flip; flip TTA",
    r"several labels": "multi-label",
    r"mended": "fixed",
    r"told": "reported",
    r"goes on": "resumes; continues",
    r"the house": "the architecture",
    r"exhibits?": "panel; figure",
    r"half[- ]way": "weight interpolation (WiSE-FT)",
    r"drawn towards": "regularized towards",
    r"(train|training|val|validation|test) parts?": "training set, validation set, test set; split",
    r"parts? of the (data|training|test|validation)": "split; fraction",
    r"matrix products?": "matmul",
    r"behaviou\w*": "behavior",
    r"colou\w*": "color",
    r"neighbou\w*": "neighbor",
    r"grey\w*": "gray",
    r"artefacts?": "artifact",
    r"centred?": "center",
    r"(initiali|minimi|normali|optimi|organi|penali|quanti|randomi|reali|recogni|standardi|summari)"
    r"s(e[ds]?|ing|ations?|ers?)": "-ize",
}
BANNED = re.compile(r"\b(" + "|".join(REPLACED_WORDS) + r")\b", re.IGNORECASE)
# Legitimate uses, by file: old names that are still read, names of random streams, whose strings must not change, HTML
# elements, column names of other projects, and questions with answers.
ALLOWED_WORDS: dict[str, set[str]] = {
    "docs/upgrading.md": {"*"},
    "docs/decisions/0001-keyed-randomness.md": {"colour"},
    "docs/decisions/0017-format-version-2.md": {"colour"},
    "src/patchword/config/format_v1.py": {"*"},
    "src/patchword/data/formats/arrow_rows.py": {"picture"},
    "src/patchword/data/transforms/augment.py": {"colour"},
    "src/patchword/data/transforms/randaugment.py": {"colour"},
    "src/patchword/report/templates/macros.html.j2": {"picture"},
    "src/patchword/studies/__init__.py": {"answer"},
    "src/patchword/studies/study.py": {"answers"},
    "src/patchword/training/checkpointing.py": {"told"},
}
TEXT_SUFFIXES = {".py", ".md", ".html", ".css", ".js", ".svg", ".jinja", ".j2"}


def written_texts() -> list[Path]:
    """Every hand-written text that users or developers read; LOG.md may quote old names."""
    package = [p for p in SOURCE.rglob("*") if p.suffix in TEXT_SUFFIXES]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages = [page for page in pages if page.name not in ("LOG.md", "CHANGELOG.md")]
    return sorted([*package, *pages])


def find_replaced_words(text: str, allowed: Collection[str] = ()) -> list[str]:
    """`line: word` of every replaced word in a text."""
    if "*" in allowed:
        return []
    return [
        f"{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in BANNED.finditer(re.sub(r"<!--n:.*?-->", "", line))  # a path in results/*.json, not prose
        if match.group().lower() not in allowed
    ]


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_layers(path: Path, source: Path = SOURCE) -> set[str]:
    """Layers that a file imports, at its top or inside functions."""
    parts = path.relative_to(source).parts
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(parts[: len(parts) - node.level])
            target = base + (node.module.split(".") if node.module else [])
            layers |= {target[0]} if target else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "patchword":
            layers |= set((node.module or "").split(".")[1:2]) or {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            layers |= {a.name.split(".")[1] for a in node.names if a.name.startswith("patchword.")}
    return layers & set(LAYERS)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function and method, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes at module level without a docstring."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    return [node.name for node in public if ast.get_docstring(node) is None]


def id_of(path: Path) -> str:
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT))


@pytest.mark.parametrize("path", MODULES, ids=id_of)
def test_imports_go_down(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if layer in ("__init__", "__main__"):
        return
    assert layer in LAYERS, f"{layer} is not a layer of the architecture"
    higher = {other for other in imported_layers(path) if LAYERS.index(other) > LAYERS.index(layer)}
    assert not higher, f"{path.name} imports {higher} from above"


def test_import_check_finds_upward_imports(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    bad = tmp_path / "models/bad.py"
    bad.write_text("from ..checkpoints import load\ndef f():\n    from patchword.inference import classifier\n")
    assert imported_layers(bad, tmp_path) == {"checkpoints", "inference"}


def test_file_names_are_unique() -> None:
    counts = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("path", MODULES, ids=id_of)
def test_functions_fit_on_a_screen(path: Path) -> None:
    long = {name: size for name, size in functions(ast.parse(path.read_text())) if size > MAX_FUNCTION_LINES}
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", MODULES, ids=id_of)
def test_public_functions_and_classes_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.name} has no module docstring"
    assert not undocumented(tree)


def test_docstring_check_finds_undocumented_names() -> None:
    tree = ast.parse('def f():\n    "Documented."\n\ndef g(): ...\n\nclass C: ...\n\ndef _private(): ...\n')
    assert undocumented(tree) == ["g", "C"]


def test_vit_stays_readable() -> None:
    lines = (SOURCE / "models/vit.py").read_text().count("\n")
    assert lines <= MAX_VIT_LINES, f"models/vit.py has {lines} lines; options belong in other files"


@pytest.mark.parametrize("path", written_texts(), ids=id_of)
def test_vocabulary(path: Path) -> None:
    name = relative_name(path)
    words = find_replaced_words(path.read_text(), ALLOWED_WORDS.get(name, set()))
    assert not words, f"{name} uses words that REPLACED_WORDS replaces: {'; '.join(words[:10])}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("An image, its prediction and the test set.", []),
        ("Two pictures", ["1: pictures"]),
        ("fine\nthe training part, normalised", ["2: training part", "2: normalised"]),
        ("from nothing; the model's answers", ["1: from nothing", "1: answers"]),
        ("a counterpart of the module, optimizer, realistic", []),
    ],
)
def test_vocabulary_check(text: str, words: list[str]) -> None:
    assert find_replaced_words(text) == words


def test_vocabulary_allow_list_names_existing_files() -> None:
    assert not [name for name in ALLOWED_WORDS if not (ROOT / name).exists()]
    assert find_replaced_words("colour, picture", {"colour"}) == ["1: picture"]


def test_public_names_exist() -> None:
    for name in pw.__all__:
        assert getattr(pw, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pw.nothing


def test_versions_agree() -> None:
    """pyproject.toml takes the version from `patchword.__version__`."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert document["project"]["dynamic"] == ["version"]
    assert document["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "patchword.__version__"}
    section = "Unreleased" if ".dev" in pw.__version__ else pw.__version__
    assert f"## {section}" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_pinned_for_development_and_open_for_users() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch==2.13.0" in constraints
    assert any(d.startswith("torch>=2.10,<3") for d in project["dependencies"])
    assert not any("torchvision" in d for d in project["dependencies"])


def test_readme_starts_with_the_two_commands() -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make demo" in head
    assert "make test" in head
