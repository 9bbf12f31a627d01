"""Parses the arguments of a command into the keywords of its function.

argparse splits the words; values are converted here, so that every error names the flag, the value seen, what is valid,
and an example.
"""

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigError
from .arguments import REQUIRED, Argument, command_arguments, parse_doc, union_members
from .config_flags import FLAG_NOTES, FOREIGN_FLAGS, renamed_flags
from .model_args import MODEL_OPTIONS, ModelArgs

EXAMPLES = {int: "5", float: "0.5", str: "name", Path: "out"}
KINDS = {int: "an integer", float: "a number"}
NO_VALUE = object()  # of a flag at the end of the command line


class WordSplitter(argparse.ArgumentParser):
    """An argparse parser that raises a ConfigError instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.", code="invalid_arguments")


def takes_model_args(command: Callable[..., int]) -> bool:
    """Whether a command reads a model, so that metadata of the checkpoint can be overridden."""
    return "model_args" in command.__annotations__


def options_of(command: Callable[..., int]) -> tuple[Argument, ...]:
    """Return all arguments of a command, those about checkpoints included."""
    return (*command_arguments(command), *(MODEL_OPTIONS if takes_model_args(command) else ()))


def parse_arguments(name: str, command: Callable[..., int], words: Sequence[str]) -> dict[str, Any]:
    """Return the keywords with which to call a command.

    Raises:
        ConfigError: An argument is unknown, missing, or has an invalid value.
    """
    options = options_of(command)
    splitter = WordSplitter(prog=f"patchword {name}", add_help=False, allow_abbrev=False)
    for option in options:
        add_argument(splitter, option)
    given, extra = splitter.parse_known_intermixed_args(list(words))
    if extra:
        raise ConfigError(f"patchword {name} does not take {extra[0]!r}. See patchword {name} --help.")
    values = {option.name: convert(option, getattr(given, option.name)) for option in options}
    for option in options:
        if values[option.name] is REQUIRED:
            raise missing_argument(name, command, option)
    if takes_model_args(command):
        fields = [field.name for field in dataclasses.fields(ModelArgs)]
        values["model_args"] = ModelArgs(**{field: values.pop(field) for field in fields})
    return values


def add_argument(splitter: argparse.ArgumentParser, option: Argument) -> None:
    """Tell argparse how many words an argument takes."""
    if option.is_positional:
        splitter.add_argument(option.name, nargs="*" if option.is_list else "?", default=None)
    elif option.is_switch:
        splitter.add_argument(option.label, dest=option.name, action="store_true")
    else:
        words = {"nargs": "*"} if option.is_list else {"nargs": "?", "const": NO_VALUE}
        splitter.add_argument(option.label, dest=option.name, default=None, **words)


def convert(option: Argument, given: Any) -> Any:
    """Convert the words of an argument to its type; the default if there are none."""
    if option.is_switch:
        return given
    if given is None or (option.is_positional and given == []):
        return option.default
    if given is NO_VALUE or given == []:
        raise ConfigError(f"{option.label} needs a value. Example: {option.label} {example_of(option)}")
    if option.is_list:
        item_type = typing.get_args(union_members(option.hint)[0])[0]
        return tuple(convert_word(option, item_type, word) for word in given)
    return convert_word(option, union_members(option.hint)[0], given)


def convert_word(option: Argument, hint: Any, word: str) -> Any:
    """Convert one word."""
    if option.choices:
        if word not in option.choices:
            raise invalid_value(option, f"one of {', '.join(option.choices)}", word)
        return word
    try:
        return hint(word)
    except ValueError:
        raise invalid_value(option, KINDS.get(hint, hint.__name__), word) from None


def invalid_value(option: Argument, rule: str, word: str) -> ConfigError:
    """Make the error for a value of the wrong type."""
    flag = "" if option.is_positional else f"{option.label} "
    return ConfigError(f"{option.label} must be {rule}, not {word!r}. Example: {flag}{example_of(option)}")


def example_of(option: Argument) -> str:
    """Return a valid value: the default, or one of the right type."""
    if option.choices:
        return option.choices[0]
    if option.default not in (None, REQUIRED, ()):
        return " ".join(map(str, option.default)) if isinstance(option.default, tuple) else str(option.default)
    hint = union_members(option.hint)[0]
    return EXAMPLES.get(typing.get_args(hint)[0] if option.is_list else hint, option.metavar)


def missing_argument(name: str, command: Callable[..., int], option: Argument) -> ConfigError:
    """Make the error for a required argument that is not given."""
    is_listed = option.choices and option.choices[0] in option.description
    choices = f" ({', '.join(option.choices)})" if option.choices and not is_listed else ""
    description = f": {option.description}" if option.description else ""
    return ConfigError(
        f"patchword {name} needs {option.label}{choices}{description}. Example: {parse_doc(command).example}",
        code="missing_argument",
    )


def check_unknown_flags(name: str, command: Callable[..., int], words: list[str], config_flags: Iterable[str]) -> None:
    """Reject a flag that the command does not have, and suggest its new name or the closest one."""
    known = {option.label for option in options_of(command) if not option.is_positional}
    for word in (word.partition("=")[0] for word in words if word.startswith("--") and word != "--"):
        flag = word.replace("_", "-")
        if flag in known:
            continue
        hint = suggest_flag(flag, sorted(known | set(config_flags)))
        message = f"patchword {name} has no option {word}.{hint} patchword {name} --help lists its options."
        raise ConfigError(message, code="unknown_option")


def suggest_flag(flag: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown flag: its new name, its name here, a field of that name, or a similar flag."""
    name = flag.removeprefix("--")
    candidates = [renamed_flags().get(flag, ""), FOREIGN_FLAGS.get(flag, "")]
    candidates += [other for other in known if other.endswith(f".{name}")]
    similar = difflib.get_close_matches(name, [other.removeprefix("--") for other in known], n=1)
    found = next((other for other in candidates if other in known), "") or "".join(f"--{other}" for other in similar)
    hint = f" Did you mean {found}?" if found else ""
    is_note_right = FOREIGN_FLAGS.get(flag, found) == found
    return f"{hint} {FLAG_NOTES[flag]}" if flag in FLAG_NOTES and is_note_right else hint
