"""Arguments of the commands as data: read from signatures and docstrings, for the parser, --help and completion.

A parameter of a command is an option, and `Annotated[str, positional("DATA")]` a positional argument. Its description
is in the "Args" section of the command's docstring, or in the annotation if commands share it.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

REQUIRED: Any = inspect.Parameter.empty  # the default of an argument that must be given
MAX_CHOICES_WIDTH = 60  # of choices as a metavar; --help lists longer ones in the description
METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH", bool: "true|false"}


@dataclass(frozen=True)
class ArgSpec:
    """How an argument is shown in --help."""

    metavar: str = ""
    description: str = ""
    is_positional: bool = False


def arg(metavar: str = "", description: str = "") -> ArgSpec:
    """Annotate an option with its metavar and, if several commands share it, its description."""
    return ArgSpec(metavar, description)


def positional(metavar: str, description: str = "") -> ArgSpec:
    """Annotate a positional argument."""
    return ArgSpec(metavar, description, is_positional=True)


@dataclass(frozen=True)
class Argument:
    """An argument of a command, or a config field that is a flag.

    Attributes:
        name: Name of the parameter, or path of the field.
        hint: Type, without annotations.
        default: Default, or `REQUIRED`.
        is_field: Whether it is a config field, so that even a bool takes a value.
    """

    name: str
    hint: Any
    metavar: str
    description: str
    default: Any = REQUIRED
    is_positional: bool = False
    is_field: bool = False

    @property
    def label(self) -> str:
        """The flag, or the metavar of a positional argument."""
        return self.metavar if self.is_positional else "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.hint is bool and not self.is_field

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return any(typing.get_origin(option) is tuple for option in union_members(self.hint))

    @property
    def choices(self) -> tuple[str, ...]:
        """All valid values, if they can be listed."""
        literals = [typing.get_args(o) for o in union_members(self.hint) if typing.get_origin(o) is Literal]
        return tuple(str(value) for values in literals for value in values)


@dataclass(frozen=True)
class CommandDoc:
    """The docstring of a command in parts."""

    summary: str
    example: str
    paragraphs: tuple[str, ...]
    descriptions: dict[str, str]


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union except None; a single type for anything else."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(option for option in typing.get_args(hint) if option is not type(None))
    return (hint,)


def strip_annotation(hint: Any) -> tuple[Any, list[ArgSpec]]:
    """Split `Annotated[T, ...]` into T and its specs, the innermost first."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, []
    inner, *metadata = typing.get_args(hint)
    base, specs = strip_annotation(inner)
    return base, [*specs, *(item for item in metadata if isinstance(item, ArgSpec))]


def default_metavar(hint: Any) -> str:
    """Return a metavar for a type: N for integers, a|b for choices."""
    member = union_members(hint)[0]
    if typing.get_origin(member) is Literal:
        choices = "|".join(map(str, typing.get_args(member)))
        return choices if len(choices) <= MAX_CHOICES_WIDTH else "NAME"
    if typing.get_origin(member) is tuple:
        items = typing.get_args(member)
        if items == (int, int):
            return "HxW"
        return f"{default_metavar(items[0])}..." if items[-1] is ... else " ".join(map(default_metavar, items))
    return METAVARS.get(member, "NAME")


@functools.cache
def parse_doc(command: Callable[..., int]) -> CommandDoc:
    """Split the docstring of a command into summary, example, further paragraphs and descriptions of arguments."""
    text, _, args = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")
    summary, *rest = [paragraph.replace("\n", " ").strip() for paragraph in text.split("\n\n")]
    example = next((p.removeprefix("Example: ") for p in rest if p.startswith("Example: ")), "")
    descriptions: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(args).splitlines():
        if line.startswith(" "):
            descriptions[name] += " " + line.strip()
        elif line:
            name, _, description = line.partition(": ")
            descriptions[name] = description.strip()
    return CommandDoc(summary, example, tuple(p for p in rest if p and not p.startswith("Example: ")), descriptions)


@functools.cache
def command_arguments(command: Callable[..., int]) -> tuple[Argument, ...]:
    """Return the arguments of a command, in the order of its signature, without `model_args`."""
    hints = typing.get_type_hints(command, include_extras=True)
    descriptions = parse_doc(command).descriptions
    arguments = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name == "model_args":
            continue
        hint, specs = strip_annotation(hints[name])
        metavar = next((spec.metavar for spec in reversed(specs) if spec.metavar), default_metavar(hint))
        shared = next((spec.description for spec in reversed(specs) if spec.description), "")
        description = descriptions.get(name, shared)
        is_positional = any(spec.is_positional for spec in specs)
        arguments.append(Argument(name, hint, metavar, description, parameter.default, is_positional))
    return tuple(arguments)


@functools.cache
def field_descriptions(cls: type) -> dict[str, str]:
    """Return the string below each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    descriptions = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            descriptions[statement.target.id] = str(following.value.value)
    return descriptions


def field_arguments(config: Any, prefix: str = "") -> list[Argument]:
    """Return the fields of a config object, or of its class if they have no defaults, as arguments."""
    cls = config if isinstance(config, type) else type(config)
    hints = typing.get_type_hints(cls, include_extras=True)
    descriptions = field_descriptions(cls)
    arguments = []
    for field in dataclasses.fields(cls):
        hint, specs = strip_annotation(hints[field.name])
        metavar = specs[-1].metavar if specs else default_metavar(hint)
        default = None if isinstance(config, type) else getattr(config, field.name)
        description = descriptions.get(field.name, "")
        arguments.append(Argument(prefix + field.name, hint, metavar, description, default, is_field=True))
    return arguments
