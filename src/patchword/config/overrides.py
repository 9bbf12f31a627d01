"""A configuration with some fields changed, as a command line says it: --optim.lr 3e-4 --model S/16 --budget 10m."""

import difflib
import re
from typing import Any

from ..errors import ConfigError
from . import Config, JsonConfig
from .model import REGULARIZATION_FIELDS
from .presets import augmentation, preset

LENGTHS = ("budget", "steps", "epochs")  # of a run: the one that is asked for replaces the recipe's own
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def config_flags(config: Config) -> dict[str, str]:
    """Every field of a configuration by its flag: {"--optim.layer-decay": "optim.layer_decay", ...}."""
    return {"--" + path.replace("_", "-"): path for path in _paths(config)}


def _paths(config: JsonConfig, prefix: str = "") -> list[str]:
    found = []
    for name in config.__dataclass_fields__:  # type: ignore[attr-defined]
        found.append(prefix + name)
        value = getattr(config, name)
        if isinstance(value, JsonConfig):
            found += _paths(value, f"{prefix}{name}.")
    return found


def apply_overrides(config: Config, changes: dict[str, Any]) -> Config:
    """`config` with the fields at these paths changed: {"optim.lr": 3e-4, "model": "S/16", "model.depth": 6}.

    Whole parts may be named: a model by its preset, an augmentation by its level, data by where they are. A budget may
    have a unit: "10m". One length of the run replaces another, and a model replaces the weights to start from.
    """
    changes = {"data.source" if n == "data" and isinstance(v, str) else n: v for n, v in changes.items()}
    meant = [(path.split("."), _meant(path, value)) for path, value in (_implied(changes) | changes).items()]
    changed = _changed(config, meant)
    _require_effect(changed, changes)
    return changed


def _require_effect(config: Config, changes: dict[str, Any]) -> None:
    """What would be ignored, since weights bring their own model along, is told."""
    within = [
        path
        for path in changes
        if path.startswith("model.") and path.removeprefix("model.") not in REGULARIZATION_FIELDS
    ]
    if config.init is not None and within:
        raise ConfigError(
            f"{', '.join(within)}: the model is that of {config.init}, which the run starts from. Another size of "
            f"picture is image_size (--image-size 160); --init none trains a model from nothing."
        )


def _implied(changes: dict[str, Any]) -> dict[str, Any]:
    """What the recipe must give up for these changes to have an effect."""
    lengths = [name for name in LENGTHS if changes.get(name) is not None]
    if len(lengths) > 1:
        raise ConfigError(f"{' and '.join(lengths)} are both given; a run has one length.")
    given: dict[str, Any] = {"budget": None, "steps": None} if lengths else {}
    from_nothing = "model" in changes or ("init" in changes and _meant("init", changes["init"]) is None)
    if from_nothing or changes.get("lora_rank"):  # random weights must not stay; LoRA says itself what does
        given["freeze"] = ()
    if from_nothing:
        given["wise_ft_alpha"] = 1.0
    if "model" not in changes:
        return given
    if _meant("init", changes.get("init")) is not None:
        raise ConfigError("init brings its own model along: leave out model, or init to train it from nothing.")
    return {**given, "init": None}


def _changed(config: Any, changes: list[tuple[list[str], Any]]) -> Any:
    """All at once, since a field may be right only together with another: a width, and the heads that divide it."""
    new: dict[str, Any] = {}
    within: dict[str, list[tuple[list[str], Any]]] = {}
    for (name, *rest), value in changes:
        if not isinstance(config, JsonConfig) or name not in config.__dataclass_fields__:  # type: ignore[attr-defined]
            known = list(getattr(config, "__dataclass_fields__", ()))
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"There is no field {'.'.join([name, *rest])}.{hint} There are {', '.join(known)}.")
        if rest:
            within.setdefault(name, []).append((rest, value))
        else:
            new[name] = value
    for name, parts in within.items():
        new[name] = _changed(new.get(name, getattr(config, name)), parts)
    return config.replace(**new)


def _meant(path: str, value: Any) -> Any:
    if path == "budget" and value is not None:
        return parse_duration(value)
    if path == "init" and str(value).lower() in ("none", ""):
        return None  # from nothing
    if path == "model" and isinstance(value, str):
        return preset(value)
    if path == "augment" and isinstance(value, str):
        return augmentation(value)
    if path == "freeze" and value in ("none", ["none"], ("none",)):
        return []
    if path in ("loggers", "freeze") and isinstance(value, str):
        return [value]
    return value


def parse_duration(text: Any) -> float:
    """A length of time: 90, "90s", "10m", "1.5h", "1h30m"."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)([a-z]*)", str(text))
    whole = "".join(number + unit for number, unit in parts) == str(text)
    if not parts or not whole or any(unit not in UNITS for _, unit in parts):
        raise ConfigError(f"{text!r} is not a length of time. Write 90s, 10m, 1.5h or 1h30m.")
    return sum(float(number) * UNITS[unit] for number, unit in parts)
