"""Each operation against Pillow, each distribution against its definition, each image independent of its batch.

Keys are fixed, so a test either passes or fails for good; statistical limits would fail one true generator in 10,000.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_images

from patchword.config import AugmentConfig
from patchword.config.presets import augmentation
from patchword.data.keyed_rng import keys, uniform
from patchword.data.transforms import image_ops as op
from patchword.data.transforms.augment import augment
from patchword.data.transforms.crop import crop_and_resize, sample_crop_boxes
from patchword.data.transforms.mixup import mix_batch, sample_mixing_weights
from patchword.data.transforms.randaugment import OPS, apply_op, randaugment
from patchword.errors import ConfigError

MIN_P_VALUE = 1e-4


@cache
def photographs(size: int = 48, channels: int = 3) -> np.ndarray:
    """Eight crops of the two photos that come with scikit-learn: uint8 (8, size, size, C)."""
    crops = []
    for photograph in load_sample_images().images:
        image = Image.fromarray(photograph).convert("RGB" if channels == 3 else "L")
        for left in (0, 150, 300, 430):
            crops.append(np.array(image.resize((size, size), box=(left, 40, left + 200, 240))))
    return np.stack(crops).reshape(8, size, size, channels)


def edge_cases(channels: int) -> np.ndarray:
    """Black, white, one gray level, two values, a ramp of few values, noise."""
    height, width = 19, 31
    ramp = np.broadcast_to((np.arange(width) * 7 % 251).astype(np.uint8)[:, None], (height, width, channels))
    noise = np.random.default_rng(0).integers(0, 256, (height, width, channels)).astype(np.uint8)
    flat = [np.full_like(noise, value) for value in (0, 255, 77)]
    return np.stack([*flat, np.where(noise < 128, 3, 250).astype(np.uint8), ramp, noise])


def as_pillow(photo: np.ndarray) -> Image.Image:
    return Image.fromarray(photo if photo.shape[2] == 3 else photo[..., 0])


def by_pillow(photos: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    return np.stack([np.array(change(as_pillow(p))).reshape(p.shape) for p in photos])


def moved(image: Image.Image, *matrix: float) -> Image.Image:
    gray = (128, 128, 128) if image.mode == "RGB" else 128
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=gray)


def rotated(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, fillcolor=(128, 128, 128) if image.mode == "RGB" else 128)


# RandAugment's operations at a level (magnitude / 10), in Pillow: color operations and geometric operations.
TONES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "autocontrast": lambda image, level: ImageOps.autocontrast(image),
    "equalize": lambda image, level: ImageOps.equalize(image),
    "invert": lambda image, level: ImageOps.invert(image),
    "posterize": lambda image, level: ImageOps.posterize(image, min(int(level * 4), 8)),
    "solarize": lambda image, level: ImageOps.solarize(image, int(level * 256)),
    "color": lambda image, level: ImageEnhance.Color(image).enhance(0.1 + 1.8 * level),
    "contrast": lambda image, level: ImageEnhance.Contrast(image).enhance(0.1 + 1.8 * level),
    "brightness": lambda image, level: ImageEnhance.Brightness(image).enhance(0.1 + 1.8 * level),
    "sharpness": lambda image, level: ImageEnhance.Sharpness(image).enhance(0.1 + 1.8 * level),
    "solarize-add": lambda image, level: image.point(lambda v: min(255, v + int(level * 110)) if v < 128 else v),
}
MOVES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "rotate": lambda image, level: rotated(image, 30 * level),
    "shear-x": lambda image, level: moved(image, 1, 0.3 * level, 0, 0, 1, 0),
    "shear-y": lambda image, level: moved(image, 1, 0, 0, 0.3 * level, 1, 0),
    "translate-x": lambda image, level: moved(image, 1, 0, level * image.width * 100 / 224, 0, 1, 0),
    "translate-y": lambda image, level: moved(image, 1, 0, 0, 0, 1, level * image.height * 100 / 224),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [3, 7, 10, 15, 20, 30])
@pytest.mark.parametrize("name", TONES)
def test_color_operations_match_pillow_exactly(name: str, magnitude: float, channels: int) -> None:
    for photos in (photographs(channels=channels), edge_cases(channels)):
        ours = apply_op(name, photos, magnitude, np.zeros((len(photos), 3)))
        np.testing.assert_array_equal(ours, by_pillow(photos, lambda image: TONES[name](image, magnitude / 10)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("direction", [-1, 1])
@pytest.mark.parametrize("magnitude", [0, 3, 10, 15, 19])  # 20 would shear by 0.6: every fifth row is a tie
@pytest.mark.parametrize("name", MOVES)
def test_geometric_operations_match_pillow(name: str, magnitude: float, direction: int, channels: int) -> None:
    photos = photographs(64, channels)[:, :50]
    draws = np.full((len(photos), 3), 0.2 if direction < 0 else 0.8)
    ours = apply_op(name, photos, magnitude, draws)
    theirs = by_pillow(photos, lambda image: MOVES[name](image, direction * magnitude / 10))
    # Pillow uses steps of 1/65536 pixel, so a few pixels are rounded to the neighbor.
    assert (ours != theirs).any(axis=3).mean() < 0.005


def test_every_operation_is_tested() -> None:
    assert {*TONES, *MOVES, "cutout"} == set(OPS)
    with pytest.raises(ValueError, match="'smear'"):
        apply_op("smear", photographs(), 10, np.zeros((8, 3)))


def test_magnitude_0_matches_big_vision() -> None:
    photos, draws = photographs(), np.zeros((8, 3))
    assert not apply_op("posterize", photos, 0, draws).any()
    np.testing.assert_array_equal(apply_op("solarize", photos, 0, draws), 255 - photos)


@pytest.mark.parametrize(("size", "side"), [(224, 120), (32, 17)])
def test_randaugment_cutout_scales_with_the_image(size: int, side: int) -> None:
    photo = np.zeros((1, size, size, 3), np.uint8)
    middle = apply_op("cutout", photo, 15, np.full((1, 3), 0.5))
    assert (middle == op.FILL_VALUE).sum() == side * side * 3
    corner = apply_op("cutout", photo, 15, np.zeros((1, 3)))
    assert (corner == op.FILL_VALUE).sum() == (side - side // 2) ** 2 * 3


def test_operations_are_sampled_uniformly_and_independently() -> None:
    photo = photographs(16)[:1]
    same = np.zeros((1, 3))
    tones = [name for name in TONES if name != "solarize"]  # at 10 it changes nothing
    results = randaugment(np.repeat(photo, 16_000, axis=0), 1, 10, keys(0, 0, np.arange(16_000)))
    counts = [(results == apply_op(name, photo, 10, same)).all(axis=(1, 2, 3)).sum() for name in tones]
    assert (
        stats.chisquare([*counts, 16_000 - sum(counts)], [*[1000] * len(tones), 16_000 - 1000 * len(tones)]).pvalue
        > MIN_P_VALUE
    )
    assert (results == photo).all(axis=(1, 2, 3)).sum() == pytest.approx(1000, abs=120)  # solarize

    twice = randaugment(np.repeat(photo, 16_000, axis=0), 2, 10, keys(0, 0, np.arange(16_000)))
    others = (results != 255 - photo).any(axis=(1, 2, 3))  # without invert as the first operation
    assert (twice == 255 - results).all(axis=(1, 2, 3))[others].sum() == pytest.approx(15_000 / 16, abs=120)


def test_directions_are_equally_likely() -> None:
    photo = np.zeros((1, 8, 8, 1), np.uint8)
    results = randaugment(np.repeat(photo, 16_000, axis=0), 1, 10, keys(1, 0, np.arange(16_000)))
    right = (results[:, :, -1] == op.FILL_VALUE).all(axis=(1, 2)) & (results[:, :, 0] == 0).all(axis=(1, 2))
    left = (results[:, :, 0] == op.FILL_VALUE).all(axis=(1, 2)) & (results[:, :, -1] == 0).all(axis=(1, 2))
    assert right.sum() > 400
    assert left.sum() > 400
    assert abs(right.sum() - left.sum()) < 4 * math.sqrt(right.sum() + left.sum())
    twice = randaugment(np.repeat(photo, 16_000, axis=0), 2, 10, keys(1, 0, np.arange(16_000)))
    # Translated twice in the same direction, along one axis or the other.
    num_empty = (twice == op.FILL_VALUE).all(axis=(1, 2, 3)).sum()
    assert num_empty == pytest.approx(2 * 16_000 / 16**2 / 2, abs=30)


EVERYTHING = AugmentConfig(
    crop="shift",
    shift_limit=0.2,
    flip=0.5,
    randaug_ops=3,
    randaug_magnitude=9,
    color_jitter=0.5,
    random_erasing=0.5,
    cutout=0.3,
)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("config", [EVERYTHING, augmentation("strong"), AugmentConfig(crop="shift", flip=0.5)])
def test_augmentation_does_not_depend_on_the_batch(config: AugmentConfig, channels: int) -> None:
    images = torch.from_numpy(np.tile(photographs(27, channels), (8, 1, 1, 1))[:, :21])  # 64 images of odd size
    names = keys(3, 4, np.arange(64))
    before = images.clone()
    together = augment(images, config, names)
    assert together.dtype == torch.uint8
    assert together.shape == images.shape
    assert torch.equal(images, before), "the input was changed"
    assert len(np.unique(together.numpy().reshape(64, -1), axis=0)) > 32, "too few distinct images"
    alone = torch.cat([augment(images[i : i + 1], config, names[i : i + 1]) for i in range(64)])
    assert torch.equal(together, alone)
    order = torch.from_numpy(np.random.default_rng(0).permutation(64))
    assert torch.equal(together[order], augment(images[order], config, names[order.numpy()]))


def test_epochs_differ_and_are_reproducible() -> None:
    images = torch.from_numpy(photographs())
    first, second, again = (augment(images, EVERYTHING, keys(0, epoch, np.arange(8))) for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_defaults_change_nothing() -> None:
    images = torch.from_numpy(photographs())
    result = augment(images, AugmentConfig(), keys(0, 0, np.arange(8)))
    assert torch.equal(result, images)
    assert result.data_ptr() != images.data_ptr()


def test_flip() -> None:
    images = torch.from_numpy(np.tile(photographs(8), (500, 1, 1, 1)))
    names = keys(0, 0, np.arange(4000))
    assert torch.equal(augment(images, AugmentConfig(flip=1.0), names), images.flip(2))
    result = augment(images, AugmentConfig(flip=0.3), names)
    mirrored = (result == images.flip(2)).flatten(1).all(1)
    assert (mirrored | (result == images).flatten(1).all(1)).all()
    assert mirrored.sum() == pytest.approx(1200, abs=116)


def test_shift_is_uniform_and_fills_with_zeros() -> None:
    height, width, count = 8, 16, 9000
    photo = torch.arange(1, 1 + height * width, dtype=torch.uint8).view(1, height, width, 1)
    result = augment(photo.repeat(count, 1, 1, 1), AugmentConfig(crop="shift"), keys(0, 0, np.arange(count)))
    framed = torch.nn.functional.pad(photo, (0, 0, 2, 2, 1, 1))
    counts = []
    for top in range(3):  # 1/8 of 8 is 1 pixel, of 16 is 2
        for left in range(5):
            window = framed[:, top : top + height, left : left + width]
            counts.append(int((result == window).flatten(1).all(1).sum()))
    assert sum(counts) == count
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE


def test_color_jitter_matches_pillow() -> None:
    photos, names = photographs(), keys(0, 0, np.arange(8))
    factors = 1 + 0.4 * (2 * uniform(names, "colour", 3) - 1)
    theirs = []
    for photo, (bright, contrast, color) in zip(photos, factors, strict=True):
        image = ImageEnhance.Brightness(Image.fromarray(photo)).enhance(bright)
        image = ImageEnhance.Contrast(image).enhance(contrast)
        theirs.append(np.array(ImageEnhance.Color(image).enhance(color)))
    ours = augment(torch.from_numpy(photos), AugmentConfig(color_jitter=0.4), names)
    np.testing.assert_array_equal(ours.numpy(), np.stack(theirs))


def test_color_jitter_is_uniform() -> None:
    gray = torch.full((5000, 1, 1, 3), 150, dtype=torch.uint8)  # contrast and saturation do not change it
    result = augment(gray, AugmentConfig(color_jitter=0.5), keys(0, 0, np.arange(5000))).numpy()[:, 0, 0, 0]
    assert result.min() >= 75
    assert result.max() <= 225
    spread = result + np.random.default_rng(0).random(5000)  # undoes the truncation
    assert stats.kstest(spread, stats.uniform(75, 150).cdf).pvalue > MIN_P_VALUE


def test_cutout_fills_a_square() -> None:
    images = torch.zeros(4000, 20, 20, 3, dtype=torch.uint8)
    result = augment(images, AugmentConfig(cutout=0.4), keys(0, 0, np.arange(4000))).numpy()
    blank = (result == op.FILL_VALUE).all(axis=3)
    assert (result[~blank] == 0).all()
    rows, columns = blank.any(axis=2).sum(axis=1), blank.any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(blank.sum(axis=(1, 2)), rows * columns)
    assert rows.max() == columns.max() == 8
    assert rows.min() == columns.min() == 4
    inside = rows == 8
    assert stats.chisquare(np.bincount(blank.any(axis=2)[inside].argmax(axis=1), minlength=13)).pvalue > MIN_P_VALUE


def test_random_erasing_fills_a_box_with_noise() -> None:
    images = torch.full((4000, 32, 32, 3), 200, dtype=torch.uint8)
    result = augment(images, AugmentConfig(random_erasing=0.25), keys(0, 0, np.arange(4000))).numpy()
    changed = (result != 200).any(axis=3)
    erased = np.flatnonzero(changed.any(axis=(1, 2)))
    assert len(erased) == pytest.approx(1000, abs=110)
    rows, columns = changed[erased].any(axis=2).sum(axis=1), changed[erased].any(axis=1).sum(axis=1)
    area = rows * columns / 1024
    assert (changed[erased].sum(axis=(1, 2)) > 0.99 * rows * columns).all()  # the noise may be 200 by chance
    assert 0.015 < area.min() < 0.04
    assert 0.29 < area.max() < 0.36
    noise = result[changed].reshape(-1)
    assert stats.chisquare(np.delete(np.bincount(noise, minlength=256), 200)).pvalue > MIN_P_VALUE
    assert not np.array_equal(result[erased[0]], result[erased[1]])
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 4 / math.sqrt(len(noise))


def plain_crop(draws: list[float], config: AugmentConfig, height: int, width: int) -> list[int]:
    """The box of one image, as torchvision's RandomResizedCrop is documented."""
    for area, proportion, down, across in zip(*(iter(draws),) * 4, strict=True):
        pixels = height * width * (config.scale[0] + area * (config.scale[1] - config.scale[0]))
        low, high = math.log(config.ratio[0]), math.log(config.ratio[1])
        ratio = math.exp(low + proportion * (high - low))
        columns, rows = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
            return [left, top, left + columns, top + rows]
    columns, rows = width, height
    if width / height < config.ratio[0]:
        rows = round(width / config.ratio[0])
    elif width / height > config.ratio[1]:
        columns = round(height * config.ratio[1])
    top, left = (height - rows) // 2, (width - columns) // 2
    return [left, top, left + columns, top + rows]


def test_crop_boxes_match_a_scalar_implementation() -> None:
    config = AugmentConfig(crop="resized", scale=(0.3, 1.0))
    sizes = np.random.default_rng(0).integers(1, 400, (2, 500))
    sizes[:, :50] = np.random.default_rng(1).integers(1, 9, (2, 50))
    names = keys(0, 0, np.arange(500))
    boxes = sample_crop_boxes(config, names, *sizes)
    draws = uniform(names, "crop", 40).tolist()
    plain = [plain_crop(d, config, h, w) for d, h, w in zip(draws, *sizes.tolist(), strict=True)]
    assert boxes.dtype == np.int64
    np.testing.assert_array_equal(boxes, plain)
    alone = np.concatenate([sample_crop_boxes(config, names[i : i + 1], *sizes[:, i : i + 1]) for i in range(500)])
    np.testing.assert_array_equal(boxes, alone)


def test_crop_boxes_have_the_expected_distribution() -> None:
    config = AugmentConfig(crop="resized", scale=(0.1, 0.4), ratio=(0.5, 2.0))
    count, side = 20_000, 4000  # large, so that boxes always fit and rounding is negligible
    left, top, right, bottom = sample_crop_boxes(config, keys(0, 0, np.arange(count)), *np.full((2, count), side)).T
    assert min(left.min(), top.min()) >= 0
    assert max(right.max(), bottom.max()) <= side
    rows, columns = bottom - top, right - left
    for values, low, high in (
        (rows * columns / side**2, 0.1, 0.4),
        (np.log(columns / rows), math.log(0.5), math.log(2)),
        (top / (side - rows), 0, 1),
        (left / (side - columns), 0, 1),
    ):
        assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > MIN_P_VALUE
    assert abs(np.corrcoef(top / (side - rows), left / (side - columns))[0, 1]) < 4 / math.sqrt(count)


def test_narrow_images_fall_back_to_a_center_crop() -> None:
    boxes = sample_crop_boxes(
        AugmentConfig(crop="resized"), keys(0, 0, np.arange(2)), np.array([1, 1000]), np.array([1000, 3])
    )
    assert boxes.tolist() == [[499, 0, 500, 1], [0, 498, 3, 502]]


def test_crop_and_resize() -> None:
    photograph = Image.fromarray(load_sample_images().images[0])
    box = np.array([100, 50, 420, 290])
    pixels = crop_and_resize(photograph, box, (60, 80), "bicubic")
    assert pixels.shape == (60, 80, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.writeable
    cut = np.array(photograph.crop((100, 50, 420, 290)).resize((80, 60), Image.Resampling.BICUBIC))
    # At the edges the filter extends beyond the box here, but not there.
    np.testing.assert_array_equal(pixels[3:-3, 3:-3], cut[3:-3, 3:-3])
    assert crop_and_resize(photograph.convert("L"), box, (60, 80), "bilinear").shape == (60, 80, 1)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.8, 1.0, 5.0, 100.0])
def test_mixing_weights_follow_a_beta_distribution(alpha: float) -> None:
    _, weights = sample_mixing_weights(AugmentConfig(mixup=alpha), keys(0, 0, np.arange(20_000)), 8, 8)
    assert weights.mean() == pytest.approx(0.5, abs=4 * weights.std() / math.sqrt(20_000))
    assert weights.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)
    if alpha >= 0.2:  # below 0.2, much of the distribution is closer to 1 than a float can express
        assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > MIN_P_VALUE


def black_and_white(pairs: int, height: int = 16, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a black and a white image with the labels 0 and 1: pixels then show the mixing weights."""
    white = torch.arange(2 * pairs) % 2
    return white.view(-1, 1, 1, 1).expand(-1, 3, height, width).float().clone(), torch.eye(2)[white]


MIXES = [AugmentConfig(mixup=0.8), AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.8, cutmix=1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("config", MIXES)
def test_labels_are_mixed_like_pixels(config: AugmentConfig) -> None:
    before, labels = black_and_white(500)
    images, targets = mix_batch(before, labels, config, keys(0, 0, np.arange(1000)))
    assert images.data_ptr() == before.data_ptr()
    assert targets.data_ptr() == labels.data_ptr()
    torch.testing.assert_close(images.mean((1, 2, 3)), targets[:, 1], atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.sum(1), torch.ones(1000))
    torch.testing.assert_close(images[0::2] + images[1::2], torch.ones(500, 3, 16, 24))  # the sum is preserved
    assert 0.15 < targets[0::2, 1].std() < 0.4


def test_cutmix_exchanges_boxes() -> None:
    images, targets = mix_batch(*black_and_white(4000), AugmentConfig(cutmix=1.0), keys(0, 0, np.arange(8000)))
    exchanged = images[0::2, 0]
    assert set(exchanged.unique().tolist()) == {0.0, 1.0}
    rows, columns = exchanged.amax(2).sum(1), exchanged.amax(1).sum(1)
    torch.testing.assert_close(exchanged.sum((1, 2)), rows * columns)
    # A square of the uniform area a, its center uniform and its corners cut off: along one side sqrt(a) - a/4 is left
    # on average, so in both together E[(s - s*s/4)**2] with s = sqrt(a), which is 1/2 - 1/5 + 1/48. The centers are
    # whole pixels and sides are rounded down, hence the tolerance.
    assert targets[0::2, 1].mean() == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.03)
    cover = exchanged.mean((0, 1))  # of each column; the mean position is the center of the image
    assert (cover * torch.arange(24)).sum() / cover.sum() == pytest.approx(11.5, abs=0.4)


def test_each_pair_uses_mixup_or_cutmix_with_equal_probability() -> None:
    images, _ = mix_batch(*black_and_white(2000), AugmentConfig(mixup=1.0, cutmix=1.0), keys(0, 0, np.arange(4000)))
    cut = ((images[0::2] == 0) | (images[0::2] == 1)).flatten(1).all(1)
    assert cut.sum() == pytest.approx(1000, abs=90)
    assert (images[0::2][~cut].flatten(1).std(1) == 0).all()  # the others have a constant gray level


@pytest.mark.parametrize("config", MIXES)
@pytest.mark.parametrize("threads", [1, 2])
def test_mixing_does_not_depend_on_the_batch_size(config: AugmentConfig, threads: int) -> None:
    names = keys(2, 3, np.arange(31))
    images = torch.from_numpy(uniform(names, "pixels", 3 * 13 * 17)).float().view(31, 3, 13, 17)
    targets = torch.from_numpy(uniform(names, "labels", 5)).float()
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = mix_batch(images.clone(), targets.clone(), config, names)
        for size in (2, 6, 14):
            chunks = [
                mix_batch(images[i : i + size].clone(), targets[i : i + size].clone(), config, names[i : i + size])
                for i in range(0, 31, size)
            ]
            assert torch.equal(torch.cat([chunk[0] for chunk in chunks]), expected[0])
            assert torch.equal(torch.cat([chunk[1] for chunk in chunks]), expected[1])
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(expected[0][30], images[30])
    assert torch.equal(expected[1][30], targets[30])
    assert not torch.equal(expected[0][:30], images[:30])


def test_without_mixing_nothing_changes() -> None:
    images, targets = black_and_white(2)
    mixed = mix_batch(images, targets, AugmentConfig(), keys(0, 0, np.arange(4)))
    assert mixed[0] is images
    assert mixed[1] is targets
    torch.testing.assert_close(images, black_and_white(2)[0], rtol=0, atol=0)


@pytest.mark.parametrize("config", MIXES)
@pytest.mark.parametrize("count", [0, 1])
def test_single_sample_is_not_mixed(config: AugmentConfig, count: int) -> None:
    images, targets = (batch[1 : 1 + count].clone() for batch in black_and_white(1))
    mix_batch(images, targets, config, keys(0, 0, np.arange(count)))
    assert images.shape == (count, 3, 16, 24)
    assert (images == 1).all()
    assert (targets == torch.tensor([0.0, 1.0])).all()


def test_empty_batch() -> None:
    assert augment(torch.zeros(0, 8, 8, 3, dtype=torch.uint8), EVERYTHING, keys(0, 0, np.arange(0))).shape == (
        0,
        8,
        8,
        3,
    )


# (operations, magnitude, mixup) of none, light2, medium2 and strong2 in big_vision's configurations for AugReg.
AUGREG = {"none": (0, None, 0.0), "light": (2, 10, 0.2), "medium": (2, 15, 0.5), "strong": (2, 20, 0.8)}


@pytest.mark.parametrize("name", AUGREG)
def test_augmentation_presets(name: str) -> None:
    config = augmentation(name)
    operations, magnitude, mixup = AUGREG[name]
    assert (config.randaug_ops, config.mixup) == (operations, mixup)
    assert magnitude is None or config.randaug_magnitude == magnitude
    assert (config.crop, config.scale, config.flip, config.cutmix) == ("resized", (0.05, 1.0), 0.5, 0.0)
    assert augmentation(name, mixup=0.1, crop="shift") == config.replace(mixup=0.1, crop="shift")


def test_unknown_augmentation() -> None:
    with pytest.raises(ConfigError, match="'huge'.*none, light, medium, strong") as error:
        augmentation("huge")
    assert error.value.code == "unknown_preset"
    with pytest.raises(ConfigError, match="flips") as error:
        augmentation("light", flips=1)
    assert error.value.code == "unknown_field"
