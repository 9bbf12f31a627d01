"""Everything that can go wrong and is not our fault.

PatchwordError
├── ConfigError        a model or a request that cannot be built as written
├── CheckpointError    a weights file that cannot be read, or does not fit the model it claims to be
│   └── ConversionError    a model that the wanted format cannot hold
├── ExportError        an exported file that does not say what the model says
├── DataError          a folder, file or list of images that cannot be used
│   └── ImageError         one picture that cannot be decoded
├── HubError           a download that did not work
└── TrainingError      a run that cannot go on

Each message says what was wrong, where, and what to do. The command line prints it without a traceback, exiting with 2.
"""


class PatchwordError(Exception):
    """Base of all errors that a user can cause and mend."""


class ConfigError(PatchwordError, ValueError):
    """A configuration that contradicts itself or leaves the allowed range."""


class CheckpointError(PatchwordError):
    """A checkpoint that cannot be read or does not fit."""


class ConversionError(CheckpointError):
    """A model that the target format has no place for."""


class ExportError(PatchwordError):
    """An export that does not keep what the model promises."""


class DataError(PatchwordError):
    """Input data that cannot be used."""


class ImageError(DataError):
    """A single image that cannot be decoded."""


class HubError(PatchwordError):
    """A model hub that cannot be reached, or answered with something else than asked for."""


class TrainingError(PatchwordError):
    """Training that met a number which is none, or cannot go on for another reason of its own."""


class Stopped(Exception):
    """A signal ended a run, whose state is saved: no error."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def how_to_install(extra: str) -> str:
    """What a plain install leaves out; no package index has patchword, so it comes from a clone."""
    return f"in a clone of patchword, pip install -c constraints.txt '.[{extra}]'"
