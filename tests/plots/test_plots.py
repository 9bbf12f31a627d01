"""Every plot function returns a figure that renders, in both themes."""

from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from patchword.inspection.attention_distance import AttentionDistance
from patchword.inspection.faithfulness import RANDOM_ORDER, FaithfulnessCurves
from patchword.inspection.filters import Filters
from patchword.plots.attention_plot import make_thumbnail, plot_classes, plot_heads, plot_methods, shorten_label
from patchword.plots.distance_plot import plot_attention_distance
from patchword.plots.faithfulness_plot import plot_faithfulness
from patchword.plots.filter_plot import MAX_POSITIONS, evenly_spaced, plot_filters, plot_pos_embed_similarity
from patchword.plots.overlay import apply_colormap, scale_to_unit
from patchword.plots.panel import Panel
from patchword.plots.theme import DARK, LIGHT, Theme, current_theme, mosaic, new_figure, scale_tiles, use_theme
from patchword.plots.token_plot import plot_patch_colors, plot_patch_similarity, plot_token_norms

RNG = np.random.default_rng(0)
IMAGE = Image.fromarray(RNG.integers(0, 256, (30, 40, 3), dtype=np.uint8))
CURVES = FaithfulnessCurves(RNG.random((2, 11)), RNG.random((2, 11)))
FILTERS = Filters("patch embedding", RNG.random((12, 3, 4, 4)), RNG.random((5, 3, 4, 4)), np.full(5, 0.1))
PLOTS: dict[str, Callable[[], Figure]] = {
    "methods": lambda: plot_methods([IMAGE], ["cat"], {"gradcam": [IMAGE]}),
    "classes": lambda: plot_classes(IMAGE, [("cat", 0.7), ("dog", 0.2)], [IMAGE, IMAGE]),
    "heads": lambda: plot_heads(RNG.random((3, 2, 4, 9)), ["1", "2", "3"]),
    "distance": lambda: plot_attention_distance(AttentionDistance(RNG.random((4, 3)), RNG.random((4, 3)), 2, 36)),
    "faithfulness": lambda: plot_faithfulness({"relevance": CURVES, RANDOM_ORDER: CURVES}),
    "filters": lambda: plot_filters(FILTERS),
    "positions": lambda: plot_pos_embed_similarity({"learned": RNG.random((3, 4, 3, 4))}),
    "norms": lambda: plot_token_norms(IMAGE, RNG.random((13, 4, 9))),
    "similarity": lambda: plot_patch_similarity(IMAGE, [((1, 2), RNG.random((4, 9)))]),
    "colors": lambda: plot_patch_colors([IMAGE, IMAGE], RNG.random((2, 4, 9, 3))),
}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", PLOTS)
def test_figures_render(name: str, theme: Theme) -> None:
    panel = Panel(name, "title", "caption", draw=PLOTS[name])
    figure = panel.figure(theme)
    assert panel.figure(theme) is figure, "drawn once per theme"
    assert figure.axes
    assert matplotlib.colors.to_hex(figure.get_facecolor()) == theme.background


def test_themes_nest() -> None:
    assert current_theme() is LIGHT
    with use_theme(DARK):
        assert current_theme() is DARK
        with use_theme(LIGHT):
            assert current_theme() is LIGHT
        assert current_theme() is DARK
    assert current_theme() is LIGHT
    assert new_figure(3, 2).get_size_inches().tolist() == [3, 2]


def test_tiles() -> None:
    tiles = np.arange(12.0).reshape(3, 2, 2)
    canvas = mosaic(tiles, 2, gap=1)
    assert canvas.shape == (5, 5)
    assert np.isnan(canvas[2]).all()
    assert canvas[3, 0] == 8
    scaled = scale_tiles(tiles)
    assert (scaled.min(axis=(1, 2)) == 0).all()
    np.testing.assert_allclose(scaled.max(axis=(1, 2)), 1)
    assert (scale_tiles(np.ones((2, 2, 2))) == 0).all()


def test_scaling_and_colors() -> None:
    np.testing.assert_allclose(scale_to_unit(np.array([[2.0, 4.0, 3.0]])), [[0, 1, 0.5]])
    assert (scale_to_unit(np.full((2, 2), 7.0)) == 0).all()
    few_outliers = np.concatenate([np.linspace(0, 4, 98), [10, 10]])
    np.testing.assert_allclose(scale_to_unit(few_outliers)[[49, 97, 98, 99]], [0.505, 1, 1, 1], atol=0.01)
    one_bright = np.concatenate([np.full(195, 0.01), [1]])
    one_bright[0] = 0
    np.testing.assert_allclose(scale_to_unit(one_bright)[[0, 1, -1]], [0, 0.05, 1], atol=1e-6)
    colors = apply_colormap(np.array([0.0, 1.0]))
    np.testing.assert_allclose(colors, [[72, 24, 120], [255, 240, 130]])


def test_evenly_spaced() -> None:
    assert evenly_spaced(3).tolist() == [0, 1, 2]
    indices = evenly_spaced(100)
    assert len(indices) == MAX_POSITIONS
    assert (indices[0], indices[-1]) == (0, 99)


@pytest.mark.parametrize(
    ("label", "expected"),
    [("tench, Tinca tinca", "tench"), ("a" * 30, "a" * 23 + "…"), ("猫" * 20, "猫" * 11 + "…"), ("", "")],
)
def test_shorten_label(label: str, expected: str) -> None:
    assert shorten_label(label) == expected


def test_thumbnails() -> None:
    assert make_thumbnail(Image.new("L", (10, 5))).shape == (210, 420, 3)
    assert make_thumbnail(Image.new("RGB", (1000, 500))).shape == (210, 420, 3)
