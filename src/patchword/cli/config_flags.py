"""Flags that are fields of a configuration: --num-heads 3, --mean 0.5 0.5 0.5, --optim.lr 3e-4.

Every command that reads a model takes any field of a model, and `train` any field of a run. They are taken out of the
command line before tyro sees it, since there are too many of them to be listed by every --help.
"""

import json
import typing
from typing import Any, Literal

from ..config import Config, ViTConfig
from ..config.overrides import config_flags
from ..errors import ConfigError

ValueKind = Literal["one", "numbers", "words"]  # what a flag takes
CHANNEL_STATS = ("mean", "std")
CONFIG_VALUES: dict[str, Any] = {}  # what the command line in hand says


def model_flags() -> dict[str, ValueKind]:
    hints = {**typing.get_type_hints(ViTConfig), **dict.fromkeys(CHANNEL_STATS, tuple[float, ...])}
    return {"--" + name.replace("_", "-"): value_kind(hint) for name, hint in hints.items()}


def run_flags(base: Config) -> dict[str, ValueKind]:
    """The fields of a run: of its own model's kind."""
    flags = {}
    for flag, path in config_flags(base).items():
        place: Any = base
        *parents, name = path.split(".")
        for parent in parents:
            place = getattr(place, parent)
        flags[flag] = value_kind(typing.get_type_hints(type(place))[name])
    return flags


def value_kind(hint: Any) -> ValueKind:
    options = [hint, *typing.get_args(hint)]  # int | None, or a tuple in a union
    lists = [o for o in options if typing.get_origin(o) is tuple]
    if not lists:
        return "one"
    return "numbers" if typing.get_args(lists[0])[0] in (int, float) else "words"


def extract_config_flags(typed: list[str], flags: dict[str, ValueKind]) -> tuple[list[str], dict[str, Any]]:
    """The command line without these flags, and their values by field.

    A flag of several numbers takes numbers only, so that the name of a picture may follow it.
    """
    rest: list[str] = []
    taken: dict[str, Any] = {}
    i = 0
    while i < len(typed):
        word, equals, value = typed[i].partition("=")
        i += 1
        flag = word.replace("_", "-")
        if flag not in flags:
            rest.append(typed[i - 1])
            continue
        values = (value.split("x") if flags[flag] == "numbers" else [value]) if equals else []
        while not equals and i < len(typed) and accepts_word(flags[flag], typed[i], values):
            values += typed[i].split("x") if flags[flag] == "numbers" else [typed[i]]
            i += 1
        parsed = parse_field(word, values)
        field = flag.removeprefix("--").replace("-", "_")
        taken[field] = [parsed] if flags[flag] == "words" and not isinstance(parsed, list) else parsed
    return rest, taken


def accepts_word(kind: ValueKind, word: str, values: list[str]) -> bool:
    """Whether a flag that has these values already takes the next word, too."""
    if kind == "one":
        return not values
    return all(map(is_number, word.split("x"))) if kind == "numbers" else not word.startswith("-")  # 224x320 is two


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parse_field(flag: str, values: list[str]) -> Any:
    """Words as JSON where they are JSON (3, 1e-6, true), else as text; the config checks what they mean."""
    if not values:
        raise ConfigError(f"{flag} needs a value (a number, or numbers with spaces between them, if it is a size).")
    parsed = []
    for value in values:
        try:
            parsed.append(json.loads(value.lower() if value in ("True", "False", "None") else value))
        except ValueError:
            parsed.append(value)
    return parsed[0] if len(parsed) == 1 else parsed
