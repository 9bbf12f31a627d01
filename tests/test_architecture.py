"""The architecture: imports go down, public names exist, versions agree."""

import ast
import tomllib
from pathlib import Path

import pytest

import patchword as pw

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/patchword"
# Lowest first; a package may import only from packages below it.
LAYERS = (
    *("errors", "core", "config", "recipes", "models", "data", "checkpoints", "engines", "inference", "metrics"),
    *("evaluation", "inspection", "plots", "report", "training", "doctor", "studies", "serve", "cli"),
)


def imported_layers(path: Path, source: Path = SOURCE) -> set[str]:
    """Layers that a file imports, at its top or inside functions."""
    parts = path.relative_to(source).parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(parts[: len(parts) - node.level])
            target = base + (node.module.split(".") if node.module else [])
            found |= {target[0]} if target else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "patchword":
            found |= set((node.module or "").split(".")[1:2]) or {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("patchword.")}
    return found & set(LAYERS)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if layer in ("__init__", "__main__"):
        return
    assert layer in LAYERS, f"{layer} is not a layer of the architecture"
    higher = {other for other in imported_layers(path) if LAYERS.index(other) > LAYERS.index(layer)}
    assert not higher, f"{path.name} imports {higher} from above"


def test_the_import_test_can_fail(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    bad = tmp_path / "models/bad.py"
    bad.write_text("from ..checkpoints import load\ndef f():\n    from patchword.inference import classifier\n")
    assert imported_layers(bad, tmp_path) == {"checkpoints", "inference"}


def test_public_names_exist() -> None:
    for name in pw.__all__:
        assert getattr(pw, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pw.nothing


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == pw.__version__
    assert f"## {pw.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_pinned_for_us_and_open_for_users() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch==2.13.0" in constraints
    assert any(d.startswith("torch>=2.10,<3") for d in project["dependencies"])
    assert not any("torchvision" in d for d in project["dependencies"])


def test_readme_starts_with_the_two_commands() -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make demo" in head
    assert "make test" in head
