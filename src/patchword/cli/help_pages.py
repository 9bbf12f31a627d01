"""The help of the command line: the overview of all commands, and the page of each with every option.

Pages are plain text for standard output. Nothing here imports torch.
"""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from os import environ
from typing import Any

from ..config import Config, JsonConfig, ViTConfig
from ..config.overrides import flag_of
from .arguments import REQUIRED, Argument, command_arguments, field_arguments, parse_doc
from .model_args import MODEL_OPTIONS
from .parser import takes_model_args

MAX_WIDTH, INDENT, MAX_LABEL = 100, 2, 30
NO_BREAK = "\N{NO-BREAK SPACE}"
TAGLINE = "Vision Transformers you can train on a laptop, see through, trust, and ship."
GROUPS = {
    "Start": {
        "quickstart": "train a small ViT on handwritten digits in about a minute",
        "train": "train or fine-tune a model on your images, or with a recipe",
        "resume": "continue a run that was stopped or killed",
        "index": "index tar shards, also in an object store, before training",
        "recipes": "list the recipes: what each one does, its command, its result",
        "models": "list the models that there are: formats, presets, hub names",
    },
    "Use": {
        "predict": "classify images, and explain the predictions",
        "embed": "write image embeddings, the features before the head",
        "convert": "write a model in the format of timm, transformers, Google, ...",
    },
    "Measure": {
        "evaluate": "measure a model on labeled images, with confidence intervals",
        "probe": "measure frozen features: few-shot, k-NN, logistic regression",
        "bench": "compare the inference engines on this machine",
        "study": "measure a claim of the paper, or of what led to it",
    },
    "Understand": {
        "show": "print what was recognized in a checkpoint, and what was assumed",
        "inspect": "draw the paper's figures, and explanations of predictions",
    },
    "Ship": {
        "export": "write an ONNX, torch.export or OpenVINO file, also in int8",
        "serve": "serve a model over HTTP: a JSON API and a web page",
        "card": "write a model card for the Hugging Face Hub",
        "push": "upload a model to the Hugging Face Hub",
    },
    "Check": {
        "doctor": "check this machine, a dataset, or a run that stopped",
        "help": "show this list, or the options of a command",
        "completion": "print a completion script for bash, zsh or fish",
    },
}
# The fields of a run that users set most, in this order; --help-all lists all of them.
MAIN_FIELDS = (
    "init", "model", "image_size", "budget", "epochs", "batch_size", "optim.lr", "augment", "freeze", "data.val",
    "data.test", "data.multi_label", "class_weights", "seed", "precision",
)  # fmt: skip
# Fields whose values are written differently on the command line than in Python.
FIELD_METAVARS = {
    "init": "MODEL", "model": "PRESET", "augment": "none|light|medium|strong", "budget": "TIME", "name": "NAME",
    "freeze": "NAME...", "data.source": "DATA", "data.val": "DATA", "data.test": "DATA", "distill.teacher": "MODEL",
}  # fmt: skip
FIELD_NOTES = {
    "init": "Pretrained model to start from: hf:owner/name, a model directory or a checkpoint file; none trains from "
    "scratch.",
    "model": "Train this architecture from scratch: Ti/16, S/16, B/16, L/16, R50x1, ...; --help-all lists its fields, "
    "such as --model.depth.",
    "image_size": "Image size in pixels, e.g. 160 or 160x224, to which position embeddings are resampled; by default, "
    "that of the model.",
    "budget": "Length of the run as time, from the start of the command to its end: 90s, 10m, 1h30m; a number without "
    "a unit is in seconds.",
    "augment": "Augmentation level of AugReg; all of them, even none, include random resized crops and flips. By "
    "default, the recipe's own settings.",
    "freeze": 'Weights to freeze: prefixes of parameter names, "all-but-head", "first-third" (embeddings and blocks), '
    "or none.",
}
# Valid values of fields that have no default, for error messages.
FIELD_EXAMPLES = {
    "budget": "10m", "epochs": "10", "steps": "1000", "image_size": "224", "num_threads": "2", "freeze": "all-but-head",
    "init": "hf:google/vit-base-patch16-224", "loggers": "tensorboard",
}  # fmt: skip


def overview(version: str, docs_url: str) -> str:
    """Return the list of all commands in groups, a line each."""
    lines = [fit(f"patchword {version}: {TAGLINE}"), "", "usage: patchword COMMAND ...", ""]
    for title, commands in GROUPS.items():
        lines += [heading(title), *(f"  {name:11} {summary}" for name, summary in commands.items()), ""]
    lines += ["patchword COMMAND --help shows its options and an example.", "patchword --version prints the version."]
    lines += [f"Documentation: {docs_url}"]
    return "\n".join(lines)


def command_page(
    name: str, command: Callable[..., int], config: Config | None, *, everything: bool, recipe: str = ""
) -> str:
    """Return the help of a command.

    Args:
        name: Name of the command.
        command: Its function.
        config: For `train`, the recipe whose fields are options; None for other commands.
        everything: Whether to list config fields that are seldom set.
        recipe: Name of the recipe; by default, that of its runs.
    """
    doc, arguments = parse_doc(command), command_arguments(command)
    parts = [fit(usage(name, arguments)), fit(doc.summary), f"Example: {doc.example}"]  # one line, to be copied
    parts += [fit(paragraph) for paragraph in doc.paragraphs]
    parts.append(section("Arguments", [a for a in arguments if a.is_positional]))
    has_more = not everything and (config is not None or takes_model_args(command))
    parts.append(section("Options", [*(a for a in arguments if not a.is_positional), help_option(has_more)]))
    if config is not None:
        parts += train_sections(config, everything, recipe or config.name)
    if takes_model_args(command):
        parts += checkpoint_sections(name, everything)
    return "\n\n".join(part for part in parts if part)


def help_option(has_more: bool) -> Argument:
    """Return the option that every command has."""
    description = "show this help; --help-all shows every option" if has_more else "show this help"
    return Argument("help", bool, "", description, default=False)


def usage(name: str, arguments: Sequence[Argument]) -> str:
    """Return the usage line: required arguments and [options]."""
    words = [a.metavar if a.default is REQUIRED or a.metavar.startswith("[") else f"[{a.metavar}]"
             for a in arguments if a.is_positional]  # fmt: skip
    words += [f"{a.label} {a.metavar}" for a in arguments if not a.is_positional and a.default is REQUIRED]
    return " ".join(["usage: patchword", name, *words, "[options]"])


def train_sections(config: Config, everything: bool, recipe: str) -> list[str]:
    """Return the options of `train` that are fields of a run, with the defaults of the recipe."""
    defaults = f"(with the defaults of the recipe {recipe})"
    if everything:
        return [section(title or f"The run {defaults}", fields) for title, fields in config_groups(config).items()]
    by_name = {field.name: field for field in config_fields(config)}
    pointer = f"These are {len(MAIN_FIELDS)} of {len(by_name)} settings: patchword train RECIPE --help-all lists all."
    return [section(f"Most used settings {defaults}", [by_name[name] for name in MAIN_FIELDS]), fit(pointer)]


def config_fields(config: Config) -> list[Argument]:
    """Return all fields of a run."""
    return [field for fields in config_groups(config).values() for field in fields]


def config_groups(config: Config) -> dict[str, list[Argument]]:
    """Return the fields of a run by the title of their section; "" is the title of those without one."""
    groups: dict[str, list[Argument]] = {"": []}
    for field in field_arguments(config):
        value = getattr(config, field.name)
        if field.name in FIELD_NOTES or not isinstance(value, JsonConfig):
            groups[""].append(on_command_line(field, config))
        if isinstance(value, JsonConfig):
            title = f"{flag_of(field.name)}.*: {field.description.rstrip('.').replace('`', '')}"
            fields = field_arguments(value, prefix=f"{field.name}.")
            groups[title] = [on_command_line(each, config) for each in fields]
    order = {name: number for number, name in enumerate(MAIN_FIELDS)}
    groups[""].sort(key=lambda field: order.get(field.name, len(order)))
    return groups


def on_command_line(field: Argument, config: Config) -> Argument:
    """Return a field with the metavar, the description and the default that are right on the command line."""
    is_unused = field.name == "epochs" and not (config.budget is None and config.steps is None)
    return dataclasses.replace(
        field,
        metavar=FIELD_METAVARS.get(field.name, field.metavar),
        description=FIELD_NOTES.get(field.name, field.description),
        default=None if is_unused else field.default,
    )


def checkpoint_sections(name: str, everything: bool) -> list[str]:
    """Return the options about checkpoints of other projects: a pointer, or all of them."""
    if not everything:
        return [fit(
            "More options change the image size of the model (--image-size 384), or supply what a checkpoint of "
            f"another library does not store (--labels, --mean, --num-heads, ...): patchword {name} --help-all."
        )]  # fmt: skip
    model_title = (
        "The model: --image-size, --in-channels and --num-classes adapt the weights; the others supply what the "
        "checkpoint does not store"
    )
    return [
        section("Labels and preprocessing, by default those of the checkpoint", MODEL_OPTIONS),
        section(model_title, field_arguments(ViTConfig)),
    ]


def section(title: str, arguments: Sequence[Argument]) -> str:
    """Return a heading with a row for each argument."""
    if not arguments:
        return ""
    labels = [row_label(argument) for argument in arguments]
    width = min(MAX_LABEL, max(map(len, labels))) + 2
    margin = " " * (INDENT + width)
    lines = [heading(fit(title))]
    for label, argument in zip(labels, arguments, strict=True):
        text = wrap(row_text(argument), max(30, page_width() - len(margin)))
        fits = len(label) + 2 <= width
        lines.append(" " * INDENT + (label.ljust(width) + text[0] if fits else label))
        lines += [margin + line for line in text[fits:]]
    return "\n".join(lines)


def row_label(argument: Argument) -> str:
    """Return the flag with its metavar."""
    if argument.is_positional or argument.is_switch:
        return argument.label
    flag = flag_of(argument.name) if argument.is_field else argument.label
    return f"{flag} {argument.metavar}"


def row_text(argument: Argument) -> str:
    """Return the description as a sentence, with choices that the metavar lacks and the default, if there is one."""
    description = argument.description.replace("`", "").strip().rstrip(".")
    description = description[:1].upper() + description[1:]
    is_listed = "|" in argument.metavar or all(choice in description for choice in argument.choices)
    if argument.choices and not is_listed:
        description += f": {', '.join(argument.choices)}"
    default = format_default(argument)
    return f"{description}." + (f" (default:{NO_BREAK}{default})" if default else "")


def format_default(argument: Argument) -> str:
    """Return the default as it would be typed; "" if there is none to show."""
    value: Any = argument.default
    if value is REQUIRED or value is None or value == () or argument.is_switch or isinstance(value, JsonConfig):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        if argument.metavar == "HxW":
            return "x".join(map(str, value))
        return " ".join(f"{item:.3g}" if isinstance(item, float) else str(item) for item in value)
    if argument.name == "budget" and argument.is_field:
        return f"{value / 60:g}m" if value >= 60 else f"{value:g}s"
    return f"{value:g}" if isinstance(value, float) else str(value)


def heading(title: str) -> str:
    """Return a title, in bold on a terminal."""
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in environ
    return title if is_plain else f"\033[1m{title}\033[0m"


def fit(text: str, indent: str = "") -> str:
    """Wrap a paragraph to the width of the page."""
    return "\n".join(wrap(text, page_width(), indent))


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Split a text into lines, without breaking flags and references, which have hyphens."""
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


def page_width() -> int:
    """Return the width of the terminal, at most `MAX_WIDTH`."""
    return min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)
