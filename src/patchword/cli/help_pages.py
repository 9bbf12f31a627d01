"""The help of the command line: the overview of all commands, and the page of each with every option.

Pages are plain text for standard output. Nothing here imports torch.
"""

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
TAGLINE = "Vision Transformers you can train on a laptop, see through, trust, and ship."
GROUPS = {
    "Start": {
        "quickstart": "train a small ViT on handwritten digits in about a minute",
        "train": "train or fine-tune a model on your images, or with a recipe",
        "resume": "continue a run that was stopped or killed",
        "recipes": "list the recipes: what each reaches and how long it takes",
    },
    "Use": {
        "predict": "classify images, with an explanation if you like",
        "convert": "write a model in the format of timm, transformers, Google, ...",
    },
    "Measure": {
        "evaluate": "measure a model on labeled images, with confidence intervals",
        "probe": "measure frozen features: few-shot, nearest neighbors, logistic regression",
        "bench": "compare the inference engines on this machine",
        "study": "repeat an experiment of the paper at small scale",
    },
    "Understand": {"inspect": "draw the paper's figures and explanations of predictions"},
    "Ship": {
        "export": "write a file that runs without patchword: ONNX, torch.export, OpenVINO",
        "serve": "serve a model: an HTTP API and a web page",
        "card": "write a model card",
        "push": "upload a model to a Hugging Face hub",
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
SECTION_METAVARS = {"model": "PRESET", "augment": "none|light|medium|strong", "budget": "TIME"}
SECTION_NOTES = {
    "model": 'Train this architecture from scratch: Ti/16, S/16, B/16, ...; "train --help-all" has its fields.',
    "augment": "Level of augmentation after AugReg; by default the recipe's own.",
    "budget": "Length of the run as time, e.g. 90s, 10m, 1h30m, from the start of the command to its end.",
}


def overview(version: str, docs_url: str) -> str:
    """Return the list of all commands in groups, a line each."""
    lines = [f"patchword {version}: {TAGLINE}", "", "usage: patchword COMMAND ...", ""]
    for title, commands in GROUPS.items():
        lines += [heading(title), *(f"  {name:11} {summary}" for name, summary in commands.items()), ""]
    lines += ["patchword COMMAND --help shows its options and an example.", f"Documentation: {docs_url}"]
    return "\n".join(lines)


def command_page(name: str, command: Callable[..., int], config: Config | None, *, everything: bool) -> str:
    """Return the help of a command.

    Args:
        name: Name of the command.
        command: Its function.
        config: For `train`, the recipe whose fields are options; None for other commands.
        everything: Whether to list config fields that are seldom set.
    """
    doc, arguments = parse_doc(command), command_arguments(command)
    parts = [fit(usage(name, arguments)), fit(doc.summary), fit(f"Example: {doc.example}")]
    parts += [fit(paragraph) for paragraph in doc.paragraphs]
    parts.append(section("Arguments", [a for a in arguments if a.is_positional]))
    has_more = not everything and (config is not None or takes_model_args(command))
    parts.append(section("Options", [*(a for a in arguments if not a.is_positional), help_option(has_more)]))
    if config is not None:
        parts += train_sections(config, everything)
    if takes_model_args(command):
        parts += checkpoint_sections(name, everything)
    return "\n\n".join(part for part in parts if part)


def help_option(has_more: bool) -> Argument:
    """Return the option that every command has."""
    description = "show this page; --help-all shows every option" if has_more else "show the options and an example"
    return Argument("help", bool, "", description, default=False)


def usage(name: str, arguments: Sequence[Argument]) -> str:
    """Return the usage line: required arguments and [options]."""
    words = [a.metavar if a.default is REQUIRED or a.metavar.startswith("[") else f"[{a.metavar}]"
             for a in arguments if a.is_positional]  # fmt: skip
    words += [f"{a.label} {a.metavar}" for a in arguments if not a.is_positional and a.default is REQUIRED]
    return " ".join(["usage: patchword", name, *words, "[options]"])


def train_sections(config: Config, everything: bool) -> list[str]:
    """Return the options of `train` that are fields of a run, with the defaults of the recipe."""
    groups = config_groups(config)
    if everything:
        return [section(title, fields) for title, fields in groups.items()]
    by_name = {field.name: field for field in config_fields(config)}
    count = len(by_name)
    pointer = f"All {count} fields of a run are options: patchword train RECIPE --help-all lists them with defaults."
    title = f"Most used fields of a run (defaults of the recipe {config.name})"
    return [section(title, [by_name[name] for name in MAIN_FIELDS]), fit(pointer)]


def config_fields(config: Config) -> list[Argument]:
    """Return all fields of a run."""
    return [field for fields in config_groups(config).values() for field in fields]


def config_groups(config: Config) -> dict[str, list[Argument]]:
    """Return the fields of a run by section."""
    groups: dict[str, list[Argument]] = {f"The run (defaults of the recipe {config.name})": []}
    run = next(iter(groups.values()))
    for field in field_arguments(config):
        value = getattr(config, field.name)
        if field.name in SECTION_NOTES:
            metavar, note = SECTION_METAVARS[field.name], SECTION_NOTES[field.name]
            default = None if isinstance(value, JsonConfig) else value
            run.append(Argument(field.name, str, metavar, note, default, is_field=True))
        elif not isinstance(value, JsonConfig):
            run.append(field)
        if isinstance(value, JsonConfig):
            title = f"{flag_of(field.name)}.*: {field.description.rstrip('.').replace('`', '')}"
            groups[title] = field_arguments(value, prefix=f"{field.name}.")
    return groups


def checkpoint_sections(name: str, everything: bool) -> list[str]:
    """Return the options about checkpoints of other projects: a pointer, or all of them."""
    if not everything:
        return [fit(
            "Metadata that a checkpoint of another project lacks (--labels, --mean, --num-heads, ...) and changes of "
            f"the model (--image-size 384) are options, too: patchword {name} --help-all lists them."
        )]  # fmt: skip
    return [
        section("Metadata that the checkpoint lacks, or that should be overridden", MODEL_OPTIONS),
        section(
            "Fields of the model, to state what the checkpoint lacks or to adapt the weights",
            field_arguments(ViTConfig),
        ),
    ]


def section(title: str, arguments: Sequence[Argument]) -> str:
    """Return a heading with a row for each argument."""
    if not arguments:
        return ""
    labels = [row_label(argument) for argument in arguments]
    width = min(MAX_LABEL, max(map(len, labels))) + 2
    margin = " " * (INDENT + width)
    lines = [heading(title)]
    for label, argument in zip(labels, arguments, strict=True):
        text = textwrap.wrap(row_text(argument), max(30, page_width() - len(margin)))
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
    """Return the description as a sentence, with the default unless that is nothing."""
    description = argument.description.replace("`", "").strip().rstrip(".")
    description = description[:1].upper() + description[1:]
    default = format_default(argument)
    return f"{description}." + (f" (default: {default})" if default else "")


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
    return textwrap.fill(text, page_width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page_width() -> int:
    """Return the width of the terminal, at most `MAX_WIDTH`."""
    return min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)
