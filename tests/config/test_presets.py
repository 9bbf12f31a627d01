"""Golden parameter counts of every preset, most of them published."""

import pytest

from patchword.config import ViTConfig
from patchword.config.presets import PRESETS, preset
from patchword.errors import ConfigError
from patchword.models import tensor_shapes

# With 1000 classes at 224 px. ViTs: published counts (timm, torchvision, Google); BiT: timm's published counts, and
# for R50x2, R152x1 and R200x3, which are not published, our own.
COUNTS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,
    "R101x1": 44_541_480,
    "R101x3": 387_934_888,
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
    "R200x3": 568_633_000,
}


def count(name: str, **changes: object) -> int:
    return sum(t.numel() for t in tensor_shapes(preset(name, **changes)).values())


def test_every_preset_is_pinned() -> None:
    assert set(COUNTS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name: str) -> None:
    assert count(name) == COUNTS[name]


def test_published_counts_at_384() -> None:
    assert round(count("R50+B/16", image_size=384) / 1e6, 2) == 98.95
    assert round(count("R+Ti/16", image_size=384) / 1e6, 2) == 6.36


def test_any_patch_size() -> None:
    config = preset("S/8", image_size=32)
    assert isinstance(config, ViTConfig)
    assert config.grid == (4, 4)


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'ViT-B/16'.*'B/16'\?") as error:
        preset("ViT-B/16")
    assert error.value.code == "unknown_preset"


@pytest.mark.parametrize("name", ["B16", "X/16", "b/16", "B/", "R50", "", "B/16x"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*Ti/16") as error:
        preset(name)
    assert error.value.code == "unknown_preset"
