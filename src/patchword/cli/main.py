"""The commands: parse, call, print. Nothing is computed here, and torch is imported only when a command needs it.

Exit codes:
    0      done; `serve` also ends with 0 when SIGTERM stops it, after it has answered what it had accepted
    1      internal error, with a traceback: please report it
    2      wrong request or configuration: a `PatchwordError`, printed as one sentence, or a usage error
    3      done, but some inputs could not be read (each is listed with its reason), or `doctor` found problems
    128+N  stopped by signal N: 130 Ctrl-C, 143 SIGTERM (a training run saves its state first), 141 the reader of
           standard output has gone, as in `patchword predict ... | head -1`
"""

import dataclasses
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import tyro

from ..errors import ConfigError, PatchwordError, Stopped
from .commands.evaluate_command import evaluate
from .commands.export_command import bench, export
from .commands.inspect_command import inspect as see_through
from .commands.predict_command import convert, predict
from .commands.probe_command import probe
from .commands.push_command import card, push
from .commands.serve_command import serve
from .commands.study_command import study
from .commands.train_command import base_config, doctor, quickstart, resume, train
from .config_flags import CONFIG_VALUES, ValueKind, model_flags, run_flags, extract_config_flags
from .model_args import ModelArgs
from .output import print_status

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
    "inspect": see_through,
    "serve": serve,
    "study": study,
    "bench": bench,
    "doctor": doctor,
}
SIGPIPE = 13  # not in `signal` on Windows
MODEL_COMMANDS = (
    "predict",
    "evaluate",
    "probe",
    "convert",
    "export",
    "card",
    "push",
    "inspect",
    "serve",
    "bench",
)  # take fields of the model as flags


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if typed == ["--version"]:
            from .. import __version__

            print(__version__)
            sys.exit(0)
        fields = config_flags_of(typed)
        rest, taken = extract_config_flags(typed, fields)
        check_unknown_flags(rest, fields)
        CONFIG_VALUES.clear()
        CONFIG_VALUES.update(taken)
        description = "Vision Transformers you can train on a laptop, see through, trust, and ship. (--version)"
        code = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="patchword", description=description, args=rest)
        print(end="", flush=True)  # here, where a reader that has gone is noticed, not at exit
    except PatchwordError as error:
        print_status(f"patchword: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        print_status("patchword: stopped")
        sys.exit(130)
    except Stopped as stopped:
        print_status(f"patchword: {stopped}")
        sys.exit(128 + stopped.signal)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails once more
        sys.exit(128 + SIGPIPE)
    sys.exit(code)


def config_flags_of(typed: list[str]) -> dict[str, ValueKind]:
    """The flags of this command that are fields of a configuration."""
    if typed[:1] == ["train"]:
        recipes = [word for word in typed[1:2] if not word.startswith("-")]
        return run_flags(base_config(recipes[0] if recipes else "finetune"))
    return model_flags() if typed[:1] and typed[0] in MODEL_COMMANDS else {}


def check_unknown_flags(rest: list[str], fields: Iterable[str]) -> None:
    """Refuses a flag that no command and no configuration has, with the nearest that there is."""
    parameters = {p for command in COMMANDS.values() for p in inspect.signature(command).parameters}
    own = {"--" + n.replace("_", "-") for n in parameters | {f.name for f in dataclasses.fields(ModelArgs)}}
    for word in (w.partition("=")[0] for w in rest if w.startswith("--")):
        if word.replace("_", "-") not in own | {"--help", "--version"}:
            near = difflib.get_close_matches(word, sorted(own | set(fields)), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"There is no option {word}.{hint} Each command lists its own with --help.")
