"""Figures as files, and a page with them; each file is whole or not there."""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..core.io import move_into_place
from ..errors import DataError
from ..plots.panel import Panel

DPI = 160
PAGE = "report.html"


def write_page(out: Path, page: str, exhibits: Sequence[Panel], names: Iterable[str]) -> None:
    """The files are made in a folder of their own and moved when all of them are whole.

    Args:
        names: of all exhibits that such a page may have; files that an earlier one left are removed
    """
    workplace = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=".page.", dir=out))
        write_exhibits(workplace, exhibits)
        (workplace / PAGE).write_text(page, encoding="utf-8")
        made = {path.name for path in workplace.iterdir()}
        for path in list(workplace.iterdir()):
            move_into_place(path, out / path.name)
        for stale in {f"{name}{ending}" for name in names for ending in (".png", ".svg", ".npz")} - made:
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{out} could not be written ({error.strerror or error}).") from None
    finally:
        if workplace is not None:
            shutil.rmtree(workplace, ignore_errors=True)


def require_room(out: Path, overwrite: bool) -> None:
    """Refuses a folder that has something in it, before hours are spent."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise DataError(f"{out} cannot be read ({error.strerror or error}).") from None
    if taken and not overwrite:
        raise DataError(f"{out} exists already. Choose another name, or add --overwrite.")


def write_exhibits(folder: Path, made: Sequence[Panel]) -> None:
    """NAME.png, NAME.svg and NAME.npz for each exhibit that was drawn."""
    from ..plots.theme import LIGHT, use_theme  # imports matplotlib

    for exhibit in made:
        if exhibit.draw is None:
            continue
        with use_theme(LIGHT):
            figure = exhibit.figure(LIGHT)
            figure.savefig(folder / f"{exhibit.name}.png", dpi=DPI)
            figure.savefig(folder / f"{exhibit.name}.svg", metadata={"Date": None})
        np.savez_compressed(folder / f"{exhibit.name}.npz", **exhibit.arrays)  # type: ignore[arg-type]
