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

import dataclasses
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import tyro

from ..core.text import print_stderr
from ..errors import ConfigError, PatchwordError, Stopped
from .commands.bench_command import bench
from .commands.card_command import card
from .commands.convert_command import convert
from .commands.doctor_command import doctor
from .commands.evaluate_command import evaluate
from .commands.export_command import export
from .commands.inspect_command import inspect_model
from .commands.predict_command import predict
from .commands.probe_command import probe
from .commands.push_command import push
from .commands.quickstart_command import quickstart
from .commands.resume_command import resume
from .commands.serve_command import serve
from .commands.study_command import study
from .commands.train_command import base_config, train
from .config_flags import (
    CHANGED_VALUES,
    CONFIG_VALUES,
    ValueKind,
    extract_config_flags,
    model_flags,
    renamed_flags,
    run_flags,
)
from .model_args import ModelArgs

DESCRIPTION = "Vision Transformers you can train on a laptop, see through, trust, and ship. (--version)"
COMMANDS: dict[str, Callable[..., int]] = {
    "quickstart": quickstart,
    "train": train,
    "resume": resume,
    "predict": predict,
    "evaluate": evaluate,
    "probe": probe,
    "convert": convert,
    "export": export,
    "card": card,
    "push": push,
    "inspect": inspect_model,
    "serve": serve,
    "study": study,
    "bench": bench,
    "doctor": doctor,
}
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
    flags = config_flags_of(words)
    rest, values = extract_config_flags(words, flags)
    check_unknown_flags(rest, flags)
    CONFIG_VALUES.clear()
    CONFIG_VALUES.update(values)
    code: int = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="patchword", description=DESCRIPTION, args=rest)
    return code


def config_flags_of(words: list[str]) -> dict[str, ValueKind]:
    """Return the flags of the command that are config fields."""
    if words[:1] == ["train"]:
        recipes = [word for word in words[1:2] if not word.startswith("-")]
        return run_flags(base_config(recipes[0] if recipes else "finetune"))
    command = COMMANDS.get(words[0]) if words else None
    takes_model = command is not None and "model_args" in inspect.signature(command).parameters
    return model_flags() if takes_model else {}


def check_unknown_flags(words: list[str], config_flags: Iterable[str]) -> None:
    """Reject a flag that no command and no config has, and suggest its new name or the closest one."""
    parameters = {name for command in COMMANDS.values() for name in inspect.signature(command).parameters}
    parameters |= {field.name for field in dataclasses.fields(ModelArgs)}
    known = {"--help", "--version", *("--" + name.replace("_", "-") for name in parameters)}
    renamed = renamed_flags()
    for word in (word.partition("=")[0] for word in words if word.startswith("--")):
        flag = word.replace("_", "-")
        if flag in known:
            continue
        matches = difflib.get_close_matches(flag, sorted(known | set(config_flags)), n=1)
        suggestions = [renamed[flag]] if flag in renamed else matches
        hint = f" Did you mean {suggestions[0]}?" if suggestions else ""
        hint += f" {CHANGED_VALUES[flag]}" if flag in CHANGED_VALUES else ""
        message = f"There is no option {word}.{hint} --help after a command lists its options."
        raise ConfigError(message, code="unknown_option")
