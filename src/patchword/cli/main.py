"""The entry point: parses the command line, runs the command, and exits with its code.

Nothing is computed here, and torch is imported only by commands that need it.

Exit codes:
    0      done; `serve` also exits with 0 when SIGTERM stops it, after it has responded to all accepted requests
    1      internal error, with a traceback: please report it
    2      wrong request or configuration: a `PatchwordError`, printed as one sentence, or a usage error
    3      done, but some inputs could not be read (each is listed with its reason), or `doctor` found problems
    128+N  stopped by signal N: 130 for Ctrl-C, 143 for SIGTERM (a training run saves its state first), 141 if standard
           output was closed, as in `patchword predict ... | head -1`
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence

from ..config import ViTConfig
from ..config.overrides import flag_of
from ..core.text import print_stderr
from ..errors import DOCS_URL, ConfigError, PatchwordError, Stopped
from .arguments import field_arguments
from .commands.bench_command import bench
from .commands.card_command import card
from .commands.completion_command import completion
from .commands.convert_command import convert
from .commands.doctor_command import doctor
from .commands.embed_command import embed
from .commands.evaluate_command import evaluate
from .commands.export_command import export
from .commands.help_command import show_help
from .commands.index_command import index
from .commands.inspect_command import inspect_model
from .commands.models_command import list_models
from .commands.predict_command import predict
from .commands.probe_command import probe
from .commands.push_command import push
from .commands.quickstart_command import quickstart
from .commands.recipes_command import recipes
from .commands.resume_command import resume
from .commands.serve_command import serve
from .commands.show_command import show
from .commands.study_command import study
from .commands.train_command import base_config, recipe_for, train
from .config_flags import CONFIG_VALUES, ValueKind, check_sections, extract_config_flags, model_flags, run_flags
from .help_pages import FIELD_EXAMPLES, command_page, config_fields, format_default, overview
from .parser import check_unknown_flags, parse_arguments, takes_model_args

COMMANDS: dict[str, Callable[..., int]] = {
    "quickstart": quickstart,
    "train": train,
    "resume": resume,
    "recipes": recipes,
    "models": list_models,
    "predict": predict,
    "embed": embed,
    "index": index,
    "convert": convert,
    "evaluate": evaluate,
    "probe": probe,
    "bench": bench,
    "study": study,
    "show": show,
    "inspect": inspect_model,
    "export": export,
    "serve": serve,
    "card": card,
    "push": push,
    "doctor": doctor,
    "help": show_help,
    "completion": completion,
}
HELP_FLAGS = ("-h", "--help", "--help-all")
SIGPIPE = 13  # `signal` does not have it on Windows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words == ["--version"]:
            from .. import __version__

            print(__version__)
            sys.exit(0)
        code = run_command(words)
        print(end="", flush=True)  # a closed pipe raises here, not at exit
    except PatchwordError as error:
        print_stderr(f"patchword: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        print_stderr("patchword: stopped")
        sys.exit(130)
    except Stopped as stopped:
        print_stderr(f"patchword: {stopped}")
        sys.exit(128 + stopped.signal)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would fail again
        sys.exit(128 + SIGPIPE)
    sys.exit(code)


def run_command(words: list[str]) -> int:
    """Parse a command line and run its command."""
    if not words or any(word in HELP_FLAGS for word in words):
        return print_help([word for word in words if word not in HELP_FLAGS], everything="--help-all" in words)
    name, command = words[0], find_command(words[0])
    flags = config_flags_of(words)
    rest, values = extract_config_flags(words[1:], flags)
    check_unknown_flags(name, command, rest, flags)
    check_sections(values, flags)
    arguments = parse_arguments(name, command, rest)
    CONFIG_VALUES.clear()
    CONFIG_VALUES.update(values)
    try:
        return command(**arguments)
    except ConfigError as error:
        raise name_flag(error, words) from error


def print_help(words: list[str], *, everything: bool = False) -> int:
    """Print the list of commands, or the page of the command that these words start with."""
    from .. import __version__

    if not words:
        print(overview(__version__, DOCS_URL))
        return 0
    name, command = words[0], find_command(words[0])
    what = recipe_of(words)
    config = base_config(what) if name == "train" else None
    print(command_page(name, command, config, everything=everything, recipe=recipe_for(what)))
    return 0


def find_command(name: str) -> Callable[..., int]:
    """Return the function of a command; a mistyped name gets a suggestion."""
    if name in COMMANDS:
        return COMMANDS[name]
    kind, known = ("option", [*HELP_FLAGS, "--version"]) if name.startswith("-") else ("command", list(COMMANDS))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    message = f"There is no {kind} {name}.{hint} patchword help lists all commands."
    raise ConfigError(message, code="unknown_command")


def recipe_of(words: list[str]) -> str:
    """Return the recipe or data that `train` is given, or its default recipe."""
    given = [word for word in words[1:2] if not word.startswith("-")]
    return given[0] if given else "finetune"


def config_flags_of(words: list[str]) -> dict[str, ValueKind]:
    """Return the flags of the command that are config fields."""
    if words[0] == "train":
        return run_flags(base_config(recipe_of(words)))
    return model_flags() if takes_model_args(COMMANDS[words[0]]) else {}


def name_flag(error: ConfigError, words: list[str]) -> ConfigError:
    """Name the flag instead of the field, and add an example, if the command line set a field to an invalid value."""
    if error.code in SHORT_FORMS:
        return ConfigError(SHORT_FORMS[error.code](error), code=error.code)
    is_train = words[0] == "train"
    path = error.field if is_train else error.field.removeprefix("model.")
    if not path or path not in CONFIG_VALUES:
        message = name_flags_in(str(error))
        return error if message == str(error) else ConfigError(message, code=error.code)
    fields = config_fields(base_config(recipe_of(words))) if is_train else field_arguments(ViTConfig())
    example = next(format_default(field) for field in fields if field.name == path) or FIELD_EXAMPLES.get(path)
    text = f" Example: {flag_of(path)} {example}" if example else ""
    return ConfigError(f"{flag_of(path)} {error.problem}{text}", code=error.code)


def explain_preset(error: ConfigError) -> str:
    """Name the flag of an unknown preset; a name of timm or Hugging Face is probably meant for --init."""
    hint = " For pretrained weights, use --init, e.g. --init hf:google/vit-base-patch16-224."
    return f"{flag_of(error.field)}: {error}{hint if error.field == 'model' else ''}"


# Errors about a short form of a flag, such as --budget ten or --model vit_tiny.
SHORT_FORMS: dict[str, Callable[[ConfigError], str]] = {
    "invalid_duration": lambda error: f"--budget: {error}",
    "unknown_preset": explain_preset,
}


def name_flags_in(message: str) -> str:
    """Name flags in a message that is about several fields."""
    for path in CONFIG_VALUES:
        field = re.escape(path)
        pattern = rf"(?<![-\w.]){field}\b" if "." in path else rf"^{field}\b(?!\.)|(?<![-\w.])model\.{field}\b"
        message = re.sub(pattern, flag_of(path), message)
    return message
