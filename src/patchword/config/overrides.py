"""Overrides of a config's fields, as the command line has them: --optim.lr 3e-4 --model S/16 --budget 10m."""

import dataclasses
import re
from typing import Any

from ..errors import ConfigError
from . import Config, JsonConfig
from .json_config import unknown_field
from .model import REGULARIZATION_FIELDS
from .presets import augmentation, preset

LENGTH_FIELDS = ("budget", "steps", "epochs")  # of a run: an override of one replaces the others
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def config_flags(config: Config) -> dict[str, str]:
    """Maps the flag of every field to its path: {"--optim.layer-decay": "optim.layer_decay", ...}."""
    return {flag_of(path): path for path in _field_paths(config)}


def flag_of(path: str) -> str:
    """Returns the flag of a field: "optim.head_lr_scale" is set by --optim.head-lr-scale."""
    return "--" + path.replace("_", "-")


def _field_paths(config: JsonConfig, prefix: str = "") -> list[str]:
    paths = []
    for field in dataclasses.fields(config):
        paths.append(prefix + field.name)
        value = getattr(config, field.name)
        if isinstance(value, JsonConfig):
            paths += _field_paths(value, f"{prefix}{field.name}.")
    return paths


def apply_overrides(config: Config, overrides: dict[str, Any]) -> Config:
    """Changes the fields at these paths: {"optim.lr": 3e-4, "model": "S/16", "model.depth": 6}.

    Sections have short forms: `model` takes the name of a preset, `augment` that of a level, and `data` a source.
    `budget` may have a unit: "10m". An override of the run's length replaces the config's own length, and one of the
    model replaces `init`.
    """
    overrides = {"data.source" if n == "data" and isinstance(v, str) else n: v for n, v in overrides.items()}
    values = {path: _parse_value(path, value) for path, value in (_implied_overrides(overrides) | overrides).items()}
    changed: Config = _replace_fields(config, [(path.split("."), value) for path, value in values.items()])
    _reject_ignored(changed, overrides)
    return changed


def _reject_ignored(config: Config, overrides: dict[str, Any]) -> None:
    """Refuses overrides of the architecture that something else determines: the data, or the weights of `init`."""
    if "model.num_classes" in overrides and config.init is None:
        raise ConfigError(
            "--model.num-classes would have no effect: the number of classes comes from the dataset.",
            code="override_ignored",
        )
    model_paths = [path for path in overrides if path.startswith("model.")]
    ignored = [path for path in model_paths if path.removeprefix("model.") not in REGULARIZATION_FIELDS]
    if config.init is not None and ignored:
        flags = ", ".join(map(flag_of, ignored))
        raise ConfigError(
            f"{flags} would have no effect: the architecture comes from --init {config.init}. "
            "To change the image size, use --image-size 160; to train from scratch, use --init none.",
            code="override_ignored",
        )


def _implied_overrides(overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns further fields that must change for these overrides to take effect."""
    lengths = [name for name in LENGTH_FIELDS if overrides.get(name) is not None]
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(map(flag_of, lengths))} are both given; a run has one length. Example: --budget 10m"
        )
    implied: dict[str, Any] = {"budget": None, "steps": None} if lengths else {}
    init = _parse_value("init", overrides.get("init"))
    if "model" in overrides and init is not None:
        raise ConfigError(
            f"--model and --init {init} are both given, but --init has its own architecture; leave one out."
        )
    from_scratch = "model" in overrides or ("init" in overrides and init is None)
    if from_scratch or overrides.get("lora_rank"):  # random weights must not be frozen; LoRA freezes by itself
        implied["freeze"] = ()
    if from_scratch:
        implied["wise_ft_alpha"] = 1.0
    if "model" in overrides:
        implied["init"] = None
    return implied


def _replace_fields(config: Any, changes: list[tuple[list[str], Any]]) -> Any:
    """Replaces fields all at once, since some are valid only together: embed_dim and a num_heads that divides it."""
    values: dict[str, Any] = {}
    sections: dict[str, list[tuple[list[str], Any]]] = {}
    for (name, *rest), value in changes:
        known = [field.name for field in dataclasses.fields(config)] if isinstance(config, JsonConfig) else []
        if name not in known:
            owner = config.section or "The config of a run" if isinstance(config, JsonConfig) else repr(config)
            raise unknown_field(".".join([name, *rest]), known, owner)
        if rest:
            sections.setdefault(name, []).append((rest, value))
        else:
            values[name] = value
    for name, section_changes in sections.items():
        values[name] = _replace_fields(values.get(name, getattr(config, name)), section_changes)
    return config.replace(**values)


def _parse_value(path: str, value: Any) -> Any:
    """Replaces short forms by what they stand for."""
    if path == "budget" and value is not None:
        return parse_duration(value)
    if path == "init" and str(value).lower() in ("none", ""):
        return None
    if path == "model" and isinstance(value, str):
        return preset(value)
    if path == "augment" and isinstance(value, str):
        return augmentation(value)
    if path == "freeze" and value in ("none", ["none"], ("none",)):
        return []
    if path in ("loggers", "freeze") and isinstance(value, str):
        return [value]
    return value


def parse_duration(duration: float | str) -> float:
    """Converts a duration to seconds: 90, "90s", "10m", "1.5h", "1h30m"."""
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        return float(duration)
    parts = re.findall(r"(\d+(?:\.\d+)?)([a-z]*)", str(duration))
    complete = "".join(number + unit for number, unit in parts) == str(duration)
    if not parts or not complete or any(unit not in SECONDS for _, unit in parts):
        raise ConfigError(f"{duration!r} is not a duration. Write 90s, 10m, 1.5h or 1h30m.", code="invalid_duration")
    return sum(float(number) * SECONDS[unit] for number, unit in parts)
