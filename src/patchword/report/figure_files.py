"""Report directories: report.html, and every figure as PNG, SVG and arrays, written atomically."""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..core.io import move_into_place
from ..errors import OutputError
from ..plots.panel import Panel

DPI = 160
REPORT_FILE = "report.html"


def write_page(out: Path, page: str, panels: Sequence[Panel], names: Iterable[str]) -> None:
    """Write a report and its figures. All files are complete before the first one is moved into place.

    Args:
        out: the directory.
        page: the HTML.
        panels: the figures.
        names: of all figures that this kind of report can have; stale files of an earlier report are removed.
    """
    staging = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".page.", dir=out))
        write_figures(staging, panels)
        (staging / REPORT_FILE).write_text(page, encoding="utf-8")
        written = {path.name for path in staging.iterdir()}
        for path in list(staging.iterdir()):
            move_into_place(path, out / path.name)
        for stale in {f"{name}{ending}" for name in names for ending in (".png", ".svg", ".npz")} - written:
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{out} could not be written ({error.strerror or error}).") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def require_empty_dir(out: Path, overwrite: bool) -> None:
    """Refuse a directory that is not empty, before anything is computed."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise OutputError(f"{out} cannot be read ({error.strerror or error}).") from None
    if taken and not overwrite:
        raise OutputError(f"{out} already exists. Choose another name, or add --overwrite.", code="output_exists")


def write_figures(folder: Path, panels: Sequence[Panel]) -> None:
    """Write NAME.png, NAME.svg and NAME.npz for each panel that has a figure; there is no PNG of one that is SVG."""
    from ..plots.theme import LIGHT, use_theme  # imports matplotlib

    for panel in panels:
        if panel.svg:
            (folder / f"{panel.name}.svg").write_text(panel.svg(LIGHT), encoding="utf-8")
        if panel.draw is None:
            continue
        with use_theme(LIGHT):
            figure = panel.figure(LIGHT)
            figure.savefig(folder / f"{panel.name}.png", dpi=DPI)
            figure.savefig(folder / f"{panel.name}.svg", metadata={"Date": None})
        np.savez_compressed(folder / f"{panel.name}.npz", **panel.arrays)  # type: ignore[arg-type]
