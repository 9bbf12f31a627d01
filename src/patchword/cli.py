"""The commands: parse, call, print. Nothing is computed here, and torch is imported only when a command needs it.

Standard output carries the result, standard error everything else. Exit codes: 0 done, 1 a fault of ours, 2 a wrong
request, 3 done but some inputs could not be read.
"""

import dataclasses
import difflib
import inspect
import json as json_format
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from .config import ViTConfig
from .errors import ConfigError, PatchwordError

if TYPE_CHECKING:
    from .checkpoints import Checkpoint

Format = Literal["patchword", "google", "big_vision", "timm", "transformers", "torchvision", "deit", "dinov2"]


def words(metavar: str, meaning: str = "") -> Any:
    return tyro.conf.arg(metavar=metavar, help=meaning or None)


MODEL = words("MODEL", "a model folder, a checkpoint file or folder of any family, or hf:owner/name")
ModelReference = Annotated[Positional[str], MODEL]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Reading:
    """What the checkpoint does not say, or says wrongly.

    Any field of the model can be given in the same way, to state it or to adapt the weights: --num-heads 3,
    --image-size 384, --num-classes 10, --norm-eps 1e-6 (docs/checkpoints.md lists them).
    """

    labels: Annotated[Path | None, words("FILE")] = None
    """text file with one label per line, or a JSON list"""
    # mean and std are shown by --help only: take_fields takes them, so that a picture's name may follow them.
    mean: Annotated[tuple[float, ...] | None, words("NUMBER...")] = None
    """of each channel, on the scale 0..1"""
    std: Annotated[tuple[float, ...] | None, words("NUMBER...")] = None
    """of each channel"""
    crop: Annotated[float | None, words("FRACTION")] = None
    """part of the resized picture that is kept, e.g. 0.9"""
    resize: Annotated[Literal["cover", "squash"] | None, words("{cover,squash}")] = None
    """keep the proportions and crop, or scale both sides"""
    interpolation: Annotated[
        Literal["nearest", "bilinear", "bicubic", "lanczos"] | None, words("{nearest,bilinear,bicubic,lanczos}")
    ] = None
    """filter for resizing"""

    def read(self, reference: str) -> "Checkpoint":
        """The checkpoint with these corrections; what was assumed goes to standard error."""
        from .checkpoints import read_checkpoint

        fields = {n: v for n, v in TAKEN.items() if n not in STATISTICS}
        changes = {n: getattr(self, n) for n in ("crop", "resize", "interpolation")}
        changes |= {n: as_list(v) for n, v in TAKEN.items() if n in STATISTICS}
        labels = read_labels(self.labels) if self.labels else None
        checkpoint = read_checkpoint(reference, **fields)
        checkpoint = checkpoint.stated(labels, **{n: v for n, v in changes.items() if v is not None})
        for note in checkpoint.notes:
            say(f"note: {note}")
        return checkpoint


NOTHING = Reading()
STATISTICS = ("mean", "std")
TAKEN: dict[str, Any] = {}  # what take_fields found on the command line


def predict(
    model: ModelReference,
    images: Annotated[Positional[tuple[str, ...]], words("IMAGE...")],
    reading: OmitArgPrefixes[Reading] = NOTHING,
    top: int = 5,
    json: Flag = False,
    csv: Annotated[Path | None, words("FILE")] = None,
    overwrite: Flag = False,
) -> int:
    """Classify pictures.

    Example: patchword predict hf:google/vit-base-patch16-224 cat.jpg photos/ --top 3

    Args:
        images: files, or folders to be searched
        top: how many classes to show
        json: one JSON document on standard output, nothing else
        csv: write a table, one row for each picture
        overwrite: replace the table if it is there
    """
    if top < 1:
        raise ConfigError(f"--top must be at least 1, not {top}.")
    if csv and csv.exists() and not overwrite:
        raise ConfigError(f"{csv} exists already. Choose another name, or add --overwrite.")
    from .classifier import Classifier
    from .evaluation import predict as prediction

    files = prediction.find_files(images)
    classifier = Classifier(reading.read(model))
    with progress("predicting", len(files)) as step:
        rows = [row for row in prediction.predict_files(classifier, files, top) if step()]
    if csv:
        prediction.write_csv(csv, rows, top)
        say(f"wrote {csv}")
    if json:
        print(json_format.dumps(rows, indent=2))
    elif not csv:
        print_predictions(rows)
    return report_unread([(row["path"], row["error"]) for row in rows if "error" in row], len(rows))


def evaluate(
    model: ModelReference,
    data: Annotated[Positional[Path], words("DATA")],
    reading: OmitArgPrefixes[Reading] = NOTHING,
    json: Flag = False,
    batch_size: int = 16,
) -> int:
    """Measure a model on a folder of class folders, named by label, WordNet id or index.

    Example: patchword evaluate model.npz imagenet/val --json

    Args:
        data: DATA/CLASS/*.jpg
        json: one JSON document on standard output, nothing else
        batch_size: pictures that go through the model together, on each core
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, not {batch_size}.")
    from .classifier import Classifier
    from .data.folders import class_folders
    from .evaluation import evaluate as measure

    total = len(class_folders(data))  # a wrong folder is told before the model is loaded
    classifier = Classifier(reading.read(model))
    with progress("evaluating", total) as step:
        result = measure(classifier, data, batch_size=batch_size, on_progress=step)
    if json:
        print(json_format.dumps(result.to_json(), indent=2))
    else:
        print_evaluation(result.figures, result.images_per_second)
    return report_unread(result.skipped, total)


def convert(
    model: ModelReference,
    out: Annotated[Positional[Path], words("OUT")],
    to: Format,
    reading: OmitArgPrefixes[Reading] = NOTHING,
    overwrite: Flag = False,
) -> int:
    """Write a model in another format; it is read back and compared before it gets its name.

    Example: patchword convert ViT-B_16.npz vit-b16 --to transformers

    Args:
        out: a folder (patchword, transformers, timm; timm also *.safetensors or *.pth), *.npz (google, big_vision) or
            *.pth (torchvision, deit, dinov2)
        to: the format to write
        overwrite: replace a model that is there
    """
    from .checkpoints import write_checkpoint

    checkpoint = reading.read(model)
    for note in write_checkpoint(out, checkpoint, to, overwrite=overwrite):
        say(f"note: {note}")
    say(f"wrote {out} ({checkpoint.family} to {to}, {sum(t.numel() for t in checkpoint.tensors.values()):,} numbers)")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {"predict": predict, "evaluate": evaluate, "convert": convert}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if typed == ["--version"]:
            from . import __version__

            print(__version__)
            sys.exit(0)
        rest, taken = take_fields(typed)
        TAKEN.clear()
        TAKEN.update(taken)
        description = "Vision Transformers you can train on a laptop, see through, trust, and ship. (--version)"
        code = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="patchword", description=description, args=rest)
    except PatchwordError as error:
        say(f"patchword: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        say("patchword: stopped")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code)


def take_fields(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the fields of the model (--num-heads 3) and the statistics (--mean 0.5 0.5 0.5) out of a command line.

    A flag of several numbers takes numbers only, so that the name of a picture may follow it.
    """
    hints = {**typing.get_type_hints(ViTConfig), **dict.fromkeys(STATISTICS, tuple[float, ...])}
    names = {"--" + name.replace("_", "-"): name for name in hints}
    rest: list[str] = []
    taken: dict[str, Any] = {}
    i = 0
    while i < len(words):
        word, equals, value = words[i].partition("=")
        i += 1
        name = names.get(word.replace("_", "-"))
        if name is None:
            check_option(word, names)
            rest.append(words[i - 1])
            continue
        values = [value] if equals else []
        several = typing.get_origin(hints[name]) is tuple
        while not equals and i < len(words) and (is_number(words[i]) if several else not values):
            values.append(words[i])
            i += 1
        taken[name] = parse_field(word, values)
    return rest, taken


def check_option(word: str, names: dict[str, str]) -> None:
    """Refuses a flag that no command and no model has, with the nearest that there is."""
    parameters = {p for command in COMMANDS.values() for p in inspect.signature(command).parameters}
    own = {"--" + n.replace("_", "-") for n in parameters | {f.name for f in dataclasses.fields(Reading)}}
    if not word.startswith("--") or word.replace("_", "-") in own | {"--help", "--version"}:
        return
    near = difflib.get_close_matches(word, sorted(own | set(names)), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"There is no option {word}.{hint} Each command lists its own with --help.")


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parse_field(flag: str, values: list[str]) -> Any:
    """Words as JSON where they are JSON (3, 1e-6, true), else as text; the config checks what they mean."""
    if not values:
        raise ConfigError(f"{flag} needs a value (a number, or numbers with spaces between them, if it is a size).")
    parsed = []
    for value in values:
        try:
            parsed.append(json_format.loads(value.lower() if value in ("True", "False", "None") else value))
        except ValueError:
            parsed.append(value)
    return parsed[0] if len(parsed) == 1 else parsed


def read_labels(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The labels in {path} cannot be read ({error}).") from None
    if path.suffix == ".json" or text.lstrip().startswith(("[", "{")):
        try:
            labels = json_format.loads(text)
        except ValueError as error:
            raise ConfigError(f"The labels in {path} are not a JSON list ({error}).") from None
        if not isinstance(labels, list):
            raise ConfigError(f"The labels in {path} must be a JSON list of names in class order, or a line each.")
        return [str(label) for label in labels]
    return [line.strip() for line in text.splitlines() if line.strip()]


def say(text: str) -> None:
    """To standard error: standard output is for results."""
    print(text, file=sys.stderr)


class progress:
    """A bar on standard error, when that is a terminal: `with progress("reading", 10) as step: step()`."""

    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(title, total=total)

    def __enter__(self) -> Callable[[], bool]:
        self.bar.start()
        return self.step

    def step(self) -> bool:
        self.bar.advance(self.task)
        return True

    def __exit__(self, *failure: object) -> None:
        self.bar.stop()


def print_predictions(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "error" in row:
            continue
        print(row["path"])
        for score in row["predictions"]:
            print(f"  {score['probability']:7.2%}  {score['label']}")


def print_evaluation(figures: dict[str, Any], speed: float) -> None:
    print(f"pictures  {figures['n']}")
    print(f"top-1     {figures['top1']:.2%}")
    print(f"top-5     {figures['top5']:.2%}")
    print(f"NLL       {figures['nll']:.4f}")
    print(f"ECE       {figures['ece']:.4f}")
    say(f"{speed:.1f} pictures per second")


def report_unread(unread: list[tuple[str, str]], total: int) -> int:
    for _, reason in unread:
        say(reason)
    if unread:
        say(f"{len(unread)} of {total} pictures could not be read.")
    return 3 if unread else 0


if __name__ == "__main__":
    main()
