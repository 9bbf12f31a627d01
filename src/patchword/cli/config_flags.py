"""Flags that are fields of a configuration: --num-heads 3, --mean 0.5 0.5 0.5, --optim.lr 3e-4.

Every command that reads a model accepts any field of a model, and `train` any field of a run. They are removed from the
command line before it is parsed: they take several numbers, or words that depend on the recipe.
"""

import json
import typing
from typing import Any, Literal

from ..config import Config, ViTConfig
from ..config.format_v1 import MODEL_FIELDS, RUN_FIELDS, SECTION_FIELDS
from ..config.overrides import config_flags, flag_of
from ..errors import ConfigError

ValueKind = Literal["single", "numbers", "words"]  # what a flag takes
CHANNEL_STATS = ("mean", "std")
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
CONFIG_VALUES: dict[str, Any] = {}  # fields on the command line of this process, set by `main`

# Flags of earlier versions and their new names.
RENAMED_FLAGS = {
    "--against": "--compare-to",
    "--batch": "--batch-size",
    "--calibrate": "--calibration-data",
    "--early-part": "--progressive-resize.fraction",
    "--early-scale": "--progressive-resize.scale",
    "--merge": "--tome-ratio",
    "--merge-drop": "--tome-max-drop",
    "--most": "--max-images",
    "--queue": "--queue-size",
    "--start-share": "--wise-ft-alpha",
    "--threads": "--num-threads",
    "--whole": "--include-preprocessing",
}
# Flags of timm's train.py and of transformers' Trainer whose names differ by more than a prefix or a typo.
FOREIGN_FLAGS = {
    "--amp": "--precision",
    "--amp-dtype": "--precision",
    "--bf16": "--precision",
    "--checkpoint-hist": "--keep-last",
    "--clip-grad": "--optim.clip-grad-norm",
    "--dataloader-num-workers": "--data.num-workers",
    "--fp16": "--precision",
    "--gradient-accumulation-steps": "--grad-accum-steps",
    "--gradient-checkpointing": "--model.grad-checkpointing",
    "--hflip": "--augment.flip",
    "--img-size": "--image-size",
    "--initial-checkpoint": "--init",
    "--label-smoothing-factor": "--label-smoothing",
    "--learning-rate": "--optim.lr",
    "--lr-scheduler-type": "--schedule.shape",
    "--max-grad-norm": "--optim.clip-grad-norm",
    "--max-steps": "--steps",
    "--min-lr": "--schedule.min-lr-ratio",
    "--model-ema-decay": "--ema",
    "--model-name-or-path": "--init",
    "--num-epochs": "--epochs",
    "--num-train-epochs": "--epochs",
    "--opt": "--optim.name",
    "--optimizer": "--optim.name",
    "--output": "--out",
    "--output-dir": "--out",
    "--per-device-train-batch-size": "--batch-size",
    "--pretrained": "--init",
    "--report-to": "--loggers",
    "--reprob": "--augment.random-erasing",
    "--save-total-limit": "--keep-last",
    "--sched": "--schedule.shape",
    "--smoothing": "--label-smoothing",
    "--warmup-epochs": "--schedule.warmup-fraction",
    "--warmup-ratio": "--schedule.warmup-fraction",
    "--workers": "--data.num-workers",
}
# What differs besides the name.
FLAG_NOTES = {
    "--amp": "Example: --precision bf16.",
    "--bf16": "Example: --precision bf16.",
    "--device": "Training uses CUDA if it is available, and all other commands run on the CPU.",
    "--fp16": "fp16 is not supported. Example: --precision bf16.",
    "--min-lr": "Its value is a fraction of the peak learning rate.",
    "--per-device-train-batch-size": "Its value is the total over all processes.",
    "--pretrained": "It takes a model. Example: --init hf:google/vit-base-patch16-224.",
    "--start-share": "Its value is 1 - start-share.",
    "--warmup-epochs": "Its value is a fraction of the run.",
}
SHORT_FORMS = ("model", "augment", "data")  # sections that take a name, as in --model S/16 (config/overrides.py)


def renamed_flags() -> dict[str, str]:
    """Return the flags of earlier versions with their new names, those of config fields included."""
    fields = {**MODEL_FIELDS, **RUN_FIELDS}
    for section, names in SECTION_FIELDS.items():
        fields |= {f"{section}.{old}": f"{section}.{new}" for old, new in names.items()}
    return {flag_of(old): flag_of(new) for old, new in fields.items()} | RENAMED_FLAGS


def model_flags() -> dict[str, ValueKind]:
    """Return the flags of all model fields, and what each takes."""
    hints = {**typing.get_type_hints(ViTConfig), **dict.fromkeys(CHANNEL_STATS, tuple[float, ...])}
    return {flag_of(name): value_kind(hint) for name, hint in hints.items()}


def run_flags(config: Config) -> dict[str, ValueKind]:
    """Return the flags of all fields of a run with this type of model, and what each takes."""
    flags = {}
    for flag, path in config_flags(config).items():
        section: Any = config
        *parents, name = path.split(".")
        for parent in parents:
            section = getattr(section, parent)
        flags[flag] = value_kind(typing.get_type_hints(type(section))[name])
    return flags


def value_kind(hint: Any) -> ValueKind:
    """Return what the flag of a field with this type hint takes."""
    options = [hint, *typing.get_args(hint)]  # int | None, or a tuple in a union
    tuples = [option for option in options if typing.get_origin(option) is tuple]
    if not tuples:
        return "single"
    return "numbers" if typing.get_args(tuples[0])[0] in (int, float) else "words"


def extract_config_flags(words: list[str], flags: dict[str, ValueKind]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into the words for the parser and the values of config fields.

    A flag that takes numbers takes nothing else, so the name of an image may follow it.
    """
    rest: list[str] = []
    values: dict[str, Any] = {}
    i = 0
    while i < len(words):
        word, equals, value = words[i].partition("=")
        i += 1
        flag = word.replace("_", "-")
        if flag not in flags:
            rest.append(words[i - 1])
            continue
        kind = flags[flag]
        texts = split_value(value, kind) if equals else []
        while not equals and i < len(words) and accepts_word(kind, words[i], texts):
            texts += split_value(words[i], kind)
            i += 1
        parsed = parse_field(word, texts, kind, words[i] if i < len(words) else "")
        field = flag.removeprefix("--").replace("-", "_")
        values[field] = [parsed] if kind == "words" and not isinstance(parsed, list) else parsed
    return rest, values


def split_value(text: str, kind: ValueKind) -> list[str]:
    """Split 224x320 into two numbers; other kinds of values stay whole."""
    return text.split("x") if kind == "numbers" else [text]


def accepts_word(kind: ValueKind, word: str, texts: list[str]) -> bool:
    """Whether a flag that has these values takes the next word, too."""
    if kind == "single":
        return not texts
    return all(map(is_number, split_value(word, kind))) if kind == "numbers" else not word.startswith("-")


def is_number(word: str) -> bool:
    """Whether a word is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and anything else in a list."""
    return value if isinstance(value, list) else [value]


def check_sections(values: dict[str, Any], flags: dict[str, ValueKind]) -> None:
    """Reject a value for a section that has only fields: --optim adam instead of --optim.name adamw."""
    for path, value in values.items():
        fields = [flag for flag in flags if flag.startswith(f"{flag_of(path)}.")]
        if fields and path not in SHORT_FORMS and not isinstance(value, dict):
            message = f"{flag_of(path)} is a group of options and takes no value, but {value!r} is given."
            raise ConfigError(f"{message} Set one of the group: {', '.join(fields)}.", code="invalid_arguments")


def parse_field(flag: str, texts: list[str], kind: ValueKind = "single", following: str = "") -> Any:
    """Parse values as JSON (3, 1e-6, true), or else as strings. The config validates them.

    Args:
        flag: The flag.
        texts: Its values.
        kind: What it takes.
        following: The next word of the command line, which is not one of its values.
    """
    if not texts:
        seen = f", not {following!r}" if following and not following.startswith("--") else ""
        example = f" Example: {flag} 224" if flag.endswith("size") else ""
        needed = "one or more numbers" if kind == "numbers" else "a value"
        raise ConfigError(f"{flag} needs {needed}{seen}.{example}", code="invalid_arguments")
    values = [parse_value(text) for text in texts]
    return values[0] if len(values) == 1 else values


def parse_value(text: str) -> Any:
    """Parse one value as a Python constant or as JSON, or else as a string."""
    if text in PYTHON_CONSTANTS:
        return PYTHON_CONSTANTS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
