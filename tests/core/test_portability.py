"""patchword imports, trains, predicts and serves on simulated Windows and macOS."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import patchword
from helpers.foreign_system import LINUX_OS, POSIX_MODULES, POSIX_OS, POSIX_SIGNALS

SOURCE = Path(patchword.__file__).parent
CHILD = Path(__file__).parents[1] / "helpers/foreign_system.py"


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_simulated_system(system: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHILD.parents[1]),
        "PATCHWORD_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(CHILD), system, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["modules"] == len([p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or p.stem != "__init__"])
    assert result["trained"] == {"steps": 3, "rows": 2}
    assert result["served"] == 200


def unguarded(tree: ast.AST) -> list[str]:
    """List uses of POSIX-only names outside a `try` and outside functions that check with `hasattr` or `getattr`."""
    found: list[str] = []

    def visit(node: ast.AST, checked: frozenset[str], in_try: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            checked |= {
                name.value for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
                and call.func.id in ("hasattr", "getattr") and isinstance(name := call.args[1], ast.Constant)
            }  # fmt: skip
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found.extend(name for name in names if name.split(".")[0] in POSIX_MODULES and not in_try)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not in_try:
            absent = {"os": POSIX_OS | LINUX_OS, "signal": POSIX_SIGNALS - {"SIG_BLOCK", "SIG_SETMASK"}}
            if node.attr in absent.get(node.value.id, ()) and node.attr not in checked:
                found.append(f"{node.value.id}.{node.attr}")
        for child in ast.iter_child_nodes(node):
            visit(child, checked, in_try or (isinstance(node, ast.Try) and child in node.body))

    visit(tree, frozenset(), False)
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_unguarded_posix_names(path: Path) -> None:
    assert unguarded(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_unguarded_finds_violations() -> None:
    code = "import fcntl\nfrom resource import x\nimport os\ndef f():\n    os.fork()\n    signal.SIGKILL\n"
    assert unguarded(ast.parse(code)) == ["fcntl", "resource", "os.fork", "signal.SIGKILL"]
    fine = "try:\n    import pwd\nexcept ImportError:\n    pass\ndef f():\n    hasattr(os, 'fork') and os.fork()\n"
    assert unguarded(ast.parse(fine)) == []
