"""The evaluation transform against its definition: resize the full image, center-crop, normalize."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from patchword.data import preprocess
from patchword.data.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from patchword.errors import ConfigError, ImageError

PLAIN = Preprocess((224, 224), crop=0.9, mean=HALF, std=HALF)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """The hardest case for resampling: every frequency, and clipping at both ends."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values if channels == 3 else values[:, :, 0])


def resize_then_crop(image: Image.Image, size: int, short: int, resample: Image.Resampling) -> np.ndarray:
    """Torchvision's Resize(short) and CenterCrop(size), in its own arithmetic, one after the other."""
    width, height = image.size
    wide = width > height
    resized = (int(short * width / height), short) if wide else (short, int(short * height / width))
    full = image.resize(resized, resample)
    left, top = round((resized[0] - size) / 2.0), round((resized[1] - size) / 2.0)
    return np.asarray(full.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("shape", [(256, 340), (383, 256), (256, 256), (375, 500), (90, 120), (301, 901), (640, 227)])
def test_cover_matches_torchvision(shape: tuple[int, int], interpolation: str) -> None:
    image = noise(*shape)
    preprocess = replace(PLAIN, interpolation=interpolation)
    expected = resize_then_crop(image, 224, 248, Image.Resampling[interpolation.upper()])
    difference = np.abs(preprocess.resize_and_crop(image).astype(int) - expected)
    # Pillow stores a box as float32: a value between two gray levels may be rounded differently, at worst in both
    # passes. With "nearest", such ties select the neighboring pixel.
    if interpolation == "nearest":
        assert (difference > 0).mean() < 0.05
    else:
        assert difference.max() <= 2
        assert (difference > 1).mean() < 1e-4
        assert difference.mean() < 0.05


def test_no_crop_matches_pillow_exactly() -> None:
    image = noise(300, 300)
    np.testing.assert_array_equal(
        replace(PLAIN, crop=1.0).resize_and_crop(image), np.asarray(image.resize((224, 224), Image.Resampling.BICUBIC))
    )


def test_image_of_the_right_size_is_unchanged() -> None:
    image = noise(224, 224)
    np.testing.assert_array_equal(replace(PLAIN, crop=1.0).resize_and_crop(image), np.asarray(image))


def test_squash_uses_the_full_image() -> None:
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 400, dtype=np.uint8), (50, 1)))
    squash = Preprocess((32, 32), "squash", mean=(0.5,), std=(0.5,)).resize_and_crop(ramp)[:, :, 0]
    cover = Preprocess((32, 32), "cover", mean=(0.5,), std=(0.5,)).resize_and_crop(ramp)[:, :, 0]
    assert squash.min() < 8
    assert squash.max() > 247
    assert cover.min() > 100
    assert cover.max() < 155


def test_squash_equals_resize_then_crop() -> None:
    image = noise(200, 333)
    expected = image.resize((248, 248), Image.Resampling.BICUBIC).crop((12, 12, 236, 236))
    difference = np.abs(replace(PLAIN, resize="squash").resize_and_crop(image).astype(int) - np.asarray(expected))
    assert difference.max() <= 1


def test_crop_is_centered() -> None:
    """A white cross through the center of a black image of any shape stays in the center."""
    for height, width in [(101, 301), (301, 101), (151, 151)]:
        values = np.zeros((height, width), dtype=np.uint8)
        values[height // 2, :] = values[:, width // 2] = 255
        output = Preprocess((51, 51), mean=(0.5,), std=(0.5,)).resize_and_crop(Image.fromarray(values))[:, :, 0]
        assert output.sum(axis=0).argmax() == 25
        assert output.sum(axis=1).argmax() == 25


def test_cover_of_non_square_sizes() -> None:
    preprocess = Preprocess((100, 200), mean=HALF, std=HALF)
    assert preprocess._full_size(100, 100) == (200, 200)
    assert preprocess._full_size(50, 400) == (100, 800)
    image = noise(120, 130)
    expected = image.resize((200, int(200 * 120 / 130)), Image.Resampling.BICUBIC)
    top = round((expected.height - 100) / 2.0)
    difference = np.abs(
        preprocess.resize_and_crop(image).astype(int) - np.asarray(expected.crop((0, top, 200, top + 100)))
    )
    assert difference.max() <= 1


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.floats(0.05, 1.0),
    st.sampled_from(["cover", "squash"]),
    st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
)
def test_every_shape_gives_the_model_size_and_keeps_a_flat_color(height, width, size, crop, resize, interpolation):
    preprocess = Preprocess(size, resize, crop, interpolation, mean=HALF, std=HALF)
    pixels = preprocess.resize_and_crop(Image.new("RGB", (width, height), (10, 120, 250)))
    assert pixels.shape == (*size, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == (10, 120, 250)).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 20000), (2, 2)])
def test_extreme_aspect_ratios(size: tuple[int, int]) -> None:
    pixels = PLAIN.resize_and_crop(Image.new("RGB", size, (3, 4, 5)))
    assert pixels.shape == (224, 224, 3)
    assert (pixels == (3, 4, 5)).all()


def test_normalize_is_bit_equal_to_the_formula() -> None:
    preprocess = Preprocess((8, 12), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    batch = torch.arange(256, dtype=torch.uint8).repeat(9).view(2, 8, 12, 12)[..., :3].contiguous()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
    expected = (batch.permute(0, 3, 1, 2).float() / 255 - mean) / std
    output = preprocess.normalize(batch)
    assert torch.equal(output, expected)
    assert output.dtype == torch.float32
    assert output.is_contiguous()
    assert output.shape == (2, 3, 8, 12)


def test_normalize_does_not_change_its_input() -> None:
    batch = torch.full((1, 4, 4, 3), 200, dtype=torch.uint8)
    PLAIN.normalize(batch)
    assert (batch == 200).all()


def test_call_is_resize_and_crop_then_normalize() -> None:
    image = noise(100, 120)
    assert torch.equal(PLAIN(image), PLAIN.normalize(torch.from_numpy(PLAIN.resize_and_crop(image))[None])[0])
    assert PLAIN(Image.new("RGB", (9, 9), "white")).unique().tolist() == [1.0]
    assert PLAIN(Image.new("RGB", (9, 9), "black")).unique().tolist() == [-1.0]


def test_l_and_rgb_images_suit_both_kinds_of_models() -> None:
    gray = Preprocess((16, 16), mean=(0.5,), std=(0.25,))
    assert gray.mode == "L"
    assert gray.channels == 1
    assert gray(noise(20, 20)).shape == (1, 16, 16)
    output = PLAIN(noise(20, 20, channels=1))
    assert output.shape == (3, 224, 224)
    assert torch.equal(output[0], output[1])


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "I;16"])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(ImageError, match="to_mode") as error:
        PLAIN.resize_and_crop(Image.new(mode, (4, 4)))
    assert error.value.code == "image_unsupported"
    assert repr(mode) in str(error.value)


@pytest.mark.parametrize(
    ("crop", "expected"), [(0.9, 248), (0.875, 256), (1.0, 224), (0.96, 233), (0.95, 235), (0.5, 448)]
)
def test_resize_size_matches_timm(crop: float, expected: int) -> None:
    assert replace(PLAIN, crop=crop).resize_size == (expected, expected)


def test_json_round_trip() -> None:
    preprocess = Preprocess((96, 128), "squash", 0.875, "lanczos", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert Preprocess.from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess
    hash(Preprocess.from_json(preprocess.to_json()))  # lists became tuples


def test_from_json_names_unknown_and_missing_fields() -> None:
    values = PLAIN.to_json()
    with pytest.raises(ConfigError, match="dept") as error:
        Preprocess.from_json(values | {"dept": 1})
    assert error.value.code == "unknown_field"
    del values["mean"], values["crop"]
    with pytest.raises(ConfigError, match="preprocess.*crop, mean"):
        Preprocess.from_json(values)
    with pytest.raises(ConfigError, match="object"):
        Preprocess.from_json([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", (0, 224)),
        ("size", (224, 16385)),
        ("size", "ab"),
        ("size", (224.5, 224)),
        ("size", (True, True)),
        ("size", (1, 2, 3)),
        ("crop", 0),
        ("crop", -0.5),
        ("crop", 1.01),
        ("crop", math.nan),
        ("crop", "0.9"),
        ("crop", True),
        ("crop", 1e-320),
        ("crop", 0.01),
        ("mean", ()),
        ("mean", (0.5, 0.5)),
        ("mean", (0.5, 0.5, math.inf)),
        ("mean", (0.5, 0.5, 10**400)),
        ("mean", (0.5, 0.5, None)),
        ("mean", "abc"),
        ("std", (0.5, 0.0, 0.5)),
        ("std", (0.5, -0.1, 0.5)),
        ("std", (0.5,)),
        ("resize", "fit"),
        ("interpolation", "cubic"),
        ("interpolation", None),
    ],
)
def test_invalid_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"(?i)preprocess\.(?:{name}|size|mean).*{name}|preprocess\.{name}"):
        Preprocess.from_json(PLAIN.to_json() | {name: value})


def test_number_of_channels_must_be_1_or_3() -> None:
    with pytest.raises(ConfigError, match=r"preprocess\.mean.*\b1\b.*\b3\b.*\b4\b"):
        Preprocess((8, 8), mean=(0.5,) * 4, std=(0.5,) * 4)


def test_squash_of_a_very_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 x 1,000,000 pixels, resized horizontally first, would need a gigabyte."""
    squash = Preprocess((224, 224), "squash", mean=HALF, std=HALF)
    num_pixels: list[int] = []
    resize = Image.Image.resize

    def recording_resize(self: Image.Image, size: tuple[int, int], *args: Any, **kwargs: Any) -> Image.Image:
        num_pixels.append(size[0] * size[1])
        return resize(self, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", recording_resize)
    pixels = squash.resize_and_crop(Image.new("RGB", (1, 1_000_000), (3, 4, 5)))
    assert pixels.shape == (224, 224, 3)
    assert (pixels == (3, 4, 5)).all()
    assert max(num_pixels) <= preprocess.MAX_INTERMEDIATE_PIXELS
    blurred = Image.fromarray(np.linspace(0, 255, 90 * 70).astype(np.uint8).reshape(90, 70)).convert("RGB")
    usual = squash.resize_and_crop(blurred).astype(int)
    monkeypatch.setattr(preprocess, "MAX_INTERMEDIATE_PIXELS", 0)
    assert np.abs(squash.resize_and_crop(blurred) - usual).max() <= 2, "the order of the passes must not matter"


def test_resize_failure_raises_image_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_memory_error(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", raise_memory_error)
    with pytest.raises(ImageError, match="9 x 8") as error:
        PLAIN.resize_and_crop(noise(8, 9))
    assert error.value.code == "image_out_of_memory"
