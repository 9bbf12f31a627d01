"""Makes the images of README and documentation.

    python docs/make_figures.py [NAME ...]

Every image in the repository is made here. Badges and those of MEASURED, which are drawn from results/ alone, are
reproducible: the same inputs give the same bytes. Those of CIFAR10 show the bundled model; attention distance
needs CIFAR-10's test set. Those of PHOTOS and SCREENS need a model (PATCHWORD_FIGURES_MODEL
and, if it has no labels, PATCHWORD_FIGURES_LABELS), scikit-image and a Chromium.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from figures import badges, cifar10, measured, photos, screens

from patchword.plots.theme import DARK, LIGHT, use_theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
# Path below docs/ -> the function that draws it.
MEASURED: dict[str, "Callable[[], Figure | str]"] = {
    "curves.svg": measured.draw_curves,
    "crossing.svg": measured.draw_crossing,
    **{f"study_{name.replace('-', '_')}.svg": partial(measured.draw_study, name) for name in measured.STUDIES},
    **{
        measured.study_panel_file(panel): partial(measured.draw_study_panel, study, panel)
        for study, panels in measured.STUDY_PANELS.items()
        for panel in panels
    },
    "images/results.svg": measured.draw_results,
    "images/images_per_class.svg": measured.draw_images_per_class,
}
CIFAR10: dict[str, Callable[[], "Figure"]] = {
    "images/cifar10_filters.png": cifar10.draw_filters,
    "images/cifar10_positions.png": cifar10.draw_positions,
    "images/cifar10_distance.png": cifar10.draw_distance,
}
PHOTOS: dict[str, Callable[[], "Figure"]] = {
    "images/hero.jpg": photos.draw_hero,
    "images/explain_classes.jpg": photos.draw_classes,
    "images/paper_strip.jpg": photos.draw_paper_strip,
    "images/walkthrough.jpg": photos.draw_walkthrough,
}
SCREENS: dict[str, Callable[[Path], None]] = {
    "images/quickstart.svg": screens.record_quickstart,
    "images/page.jpg": screens.capture_page,
}
OUTPUTS = (*MEASURED, *badges.BADGES, *CIFAR10, *PHOTOS, *SCREENS)


def make_figure(output: str, folder: Path) -> Path:
    """Make one image below a folder."""
    target = folder / output
    target.parent.mkdir(parents=True, exist_ok=True)
    if output in badges.BADGES:
        badges.write_badge(output, target)
        return target
    if output in SCREENS:
        SCREENS[output](target)
        return target
    with use_theme(DARK if output == "images/hero.jpg" else LIGHT):
        if output in MEASURED:
            measured.save_svg(MEASURED[output](), target)
        elif output in CIFAR10:
            cifar10.save_png(CIFAR10[output](), target)
        else:
            photos.save_jpeg(PHOTOS[output](), target)
    return target


def main() -> None:
    """Make all images, or those that are named."""
    by_name = {Path(output).stem: output for output in OUTPUTS}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"measured (all reproducible ones), {', '.join(by_name)}"
    )
    parser.add_argument("--out", type=Path, default=DOCS, help="another directory, for comparison")
    parser.add_argument("--list", action="store_true", help="print the paths of all images and exit")
    args = parser.parse_args()
    if args.list:
        print("\n".join(OUTPUTS))
        return
    reproducible = [Path(output).stem for output in (*MEASURED, *badges.BADGES)]
    names = reproducible if args.names == ["measured"] else args.names or list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"unknown: {', '.join(unknown)}")
    for name in names:
        print(make_figure(by_name[name], args.out))


if __name__ == "__main__":
    main()
