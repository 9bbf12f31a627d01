"""The learning curves of docs/records.md: validation accuracy over minutes of each from-scratch run in results/.

    python benchmarks/curves.py

Writes docs/curves.svg.
"""

import json

from harness import RESULTS

from patchword.plots.theme import LIGHT, new_figure, style_axes, use_theme

RUNS = {
    "cifar10_scratch_100m": ("100 minutes", "#0b3d91"),
    "cifar10_scratch_30m_seed0": ("30 minutes", "#0b62c4"),
    "cifar10_scratch_30m_seed1": ("the same, another seed", "#6aa7e8"),
    "cifar10_scratch_32px_30m_seed0": ("30 minutes, 32 pixels throughout", "#1a8a5a"),
    "cifar10_scratch_32px_30m_seed1": ("the same, another seed", "#8cc9aa"),
    "six_convolutions_100m": ("six convolutions first, 100 minutes", "#c4540b"),
}


def main() -> None:
    with use_theme(LIGHT):
        figure = new_figure(7.5, 4.5)
        title = "CIFAR-10 from scratch: the schedule of each run fits its budget"
        axes = style_axes(figure.subplots(), title, "minutes", "validation accuracy")
        for name, (label, color) in RUNS.items():
            run = json.loads((RESULTS / f"{name}.json").read_text())
            minutes = [point["seconds"] / 60 for point in run["val_curve"]]
            accuracy = [point["top1"] for point in run["val_curve"]]
            legend = f"{label}, {run['machine']['capability']}: {run['test']['top1']:.2%} on test"
            axes.plot(minutes, accuracy, "o-", color=color, linewidth=2, markersize=3, label=legend)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylim(0.5, 0.95)
        axes.set_xlim(0, None)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(RESULTS.parent / "docs/curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
