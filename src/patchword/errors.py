"""Errors and notes: every message for a user has a stable code, and control flow depends on the code alone.

PatchwordError             patchword_error
├── ConfigError            invalid_config       a model, a run or a request that cannot be built as written
├── CheckpointError        invalid_checkpoint   weights that cannot be read, or do not fit the model
│   ├── ConversionError    conversion_failed    a model that the target format cannot hold
│   └── UnknownArchitectureError
│                          architecture_unknown weights whose file does not say how the model computes
├── ExportError            export_failed        an exported model whose outputs differ from the original's
├── DataError              invalid_data         a dataset that cannot be used
│   ├── ImageError         unreadable_image     one image that cannot be decoded
│   └── DownloadError      unreachable          a dataset that cannot be downloaded (data/download.py)
├── OutputError            cannot_write         a file or directory that cannot be written, or must not be overwritten
├── StorageError           storage_failed       a directory or an object store that cannot be read or written
├── HubError               hub_failed           a model hub that cannot be reached, or does not have the model
└── TrainingError          training_failed      training stopped: NaN or Inf, or another unrecoverable error

An error that callers must tell from others of its class has a code of its own: `ImageError(..., code="image_empty")`.
Codes are part of the interface (tests/test_errors.py lists them); messages are for people and may change at any time.

Each message says what is wrong, where, and what to do. The command line prints it without a traceback and exits with
code 2.
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Self

# Messages link to pages of the documentation, which a wheel does not contain.
DOCS_URL = "https://patchword.github.io/patchword/"


class PatchwordError(Exception):
    """Base class of all errors that a user can cause and fix.

    Attributes:
        code (str): The stable code, such as "invalid_config".
    """

    code: str = "patchword_error"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(PatchwordError, ValueError):
    """Raised when a configuration or a request is invalid: a value is out of range, or values contradict each other.

    Attributes:
        field (str): The path of the field with an invalid value, such as "optim.lr"; "" if it is not about one field.
        problem (str): What is wrong with that value: the message without the path.
    """

    code = "invalid_config"

    def __init__(self, message: str = "", *, code: str | None = None, field: str = "", problem: str = "") -> None:
        super().__init__(message, code=code)
        self.field, self.problem = field, problem


class CheckpointError(PatchwordError):
    """Raised when a checkpoint cannot be read or does not fit the model."""

    code = "invalid_checkpoint"


class ConversionError(CheckpointError):
    """Raised when the target format of a conversion cannot store the model."""

    code = "conversion_failed"


class UnknownArchitectureError(CheckpointError):
    """Raised when reading a checkpoint would be a guess: neither its tensors nor its files say how the model computes.

    Attributes:
        missing (tuple[str, ...]): The fields of the config that the caller must give.
    """

    code = "architecture_unknown"

    def __init__(self, message: str = "", *, code: str | None = None, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message, code=code)
        self.missing = missing


class ExportError(PatchwordError):
    """Raised when the outputs of an exported model differ from those of the original."""

    code = "export_failed"


class DataError(PatchwordError):
    """Raised when a dataset cannot be used."""

    code = "invalid_data"


class ImageError(DataError):
    """Raised when an image cannot be decoded.

    Attributes:
        reason (str): What is wrong with the image, without its name.
    """

    code = "unreadable_image"

    def __init__(self, reason: str = "", *, name: str | None = None, code: str | None = None) -> None:
        super().__init__(reason if name is None else f"Cannot read {name}: {reason}", code=code)
        self.reason = reason


class OutputError(PatchwordError):
    """Raised when a file or directory cannot be written, or exists and must not be overwritten (`output_exists`)."""

    code = "cannot_write"


# Codes of `StorageError` that are about one object alone. All others, such as a disk that fails, too many open files or
# a server that is down, say nothing about the object.
OBJECT_CODES = frozenset({"object_not_found", "object_changed", "invalid_key", "out_of_range"})


class StorageError(PatchwordError):
    """Raised when objects of a directory or an object store cannot be listed, read or written.

    Its codes say whether trying again can help: "object_not_found", "access_denied", "storage_unreachable" (no
    proper response in time), "object_changed" (another version than expected), "invalid_key", "invalid_reference",
    "out_of_range". Those in `OBJECT_CODES` are about one object alone.
    """

    code = "storage_failed"


class HubError(PatchwordError):
    """Raised when the model hub cannot be reached, or does not have the model."""

    code = "hub_failed"


class TrainingError(PatchwordError):
    """Raised when training cannot continue, because of NaN or Inf or another unrecoverable error."""

    code = "training_failed"


class Stopped(Exception):  # noqa: N818  # not an error
    """Raised when a signal such as SIGTERM has stopped a run, after its state was saved; `resume` continues it.

    It is not a `PatchwordError`.

    Attributes:
        signal (int): The number of the signal.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class Note(str):
    """A message for the user when nothing failed, such as an assumption: a string with a stable code.

    Attributes:
        code (str): The stable code, such as "preprocess_assumed".
    """

    code: str

    def __new__(cls, text: str, code: str) -> Self:
        note = super().__new__(cls, text)
        note.code = code
        return note

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # for pickle and copy
        return str(self), self.code

    def to_json(self) -> dict[str, str]:
        """Returns the text and the code as a JSON object."""
        return {"code": self.code, "text": str(self)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Makes a note from what `to_json` returned, or from a plain string, which earlier versions saved."""
        return cls(value["text"], value["code"]) if isinstance(value, dict) else cls(str(value), "note")


def how_to_install(extra: str) -> str:
    """Returns the command that installs an optional extra, in the way in which patchword was installed."""
    origin = install_origin()
    if "dir_info" in origin:
        return f"in the clone of patchword, pip install -c constraints.txt '.[{extra}]'"
    address = f" @ git+{origin['url']}" if "vcs_info" in origin else ""
    return f"pip install 'patchword[{extra}]{address}'"


def install_origin() -> dict[str, Any]:
    """Returns pip's record of a local folder or a repository that patchword was installed from; {} for an index."""
    source = Path(__file__).resolve().parent.parent
    if source.name == "src" and (source.parent / "pyproject.toml").is_file():
        return {"dir_info": {}}  # a clone, or an editable installation of one
    try:
        record = json.loads(distribution("patchword").read_text("direct_url.json") or "{}")
        return record if isinstance(record, dict) else {}
    except (PackageNotFoundError, ValueError):
        return {}
