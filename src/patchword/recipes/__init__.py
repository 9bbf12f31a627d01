"""Recipes: small Python files with a docstring (command, machine, time, result) and a `config`.

Built-in recipes are loaded by name, and a user's own by the path of the file. A recipe imports only `patchword.config`
and `patchword.config.presets`.
"""

import ast
import difflib
import importlib
import runpy
from pathlib import Path

from ..config import Config
from ..errors import ConfigError

FOLDER = Path(__file__).parent
RECIPES = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"))


def is_recipe(name: str) -> bool:
    """Whether `name` is a built-in recipe or a Python file."""
    return name in RECIPES or name.endswith(".py")


def load_recipe(name: str) -> Config:
    """Loads the config of a recipe by its name, or by the path of a Python file."""
    path = FOLDER / f"{name}.py" if name in RECIPES else Path(name).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"There is no recipe {name}.{hint} Built-in: {', '.join(RECIPES)}; or give the path of a Python file."
        )
    if name in RECIPES:
        config = importlib.import_module(f"{__name__}.{name}").config
    else:
        try:
            config = runpy.run_path(str(path)).get("config")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except Exception as error:
            raise ConfigError(f"The recipe {path} failed with {type(error).__name__}: {error}.") from None
    if not isinstance(config, Config):
        raise ConfigError(f"The recipe {path} must set `config` to a patchword.config.Config.")
    return config


def describe_recipe(name: str) -> dict[str, str]:
    """Returns what the docstring of a built-in recipe says: its summary, command, machine and result."""
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    facts = {"summary": docstring.partition("\n")[0], "command": "", "machine": "", "result": ""}
    title = ""
    for line in docstring.splitlines()[1:]:
        word, colon, rest = line.partition(": ")
        title = word.lower() if colon and word.lower() in facts else title if line.strip() else ""
        if title:
            facts[title] = f"{facts[title]} {rest if colon and word.lower() == title else line}".strip()
    return facts
