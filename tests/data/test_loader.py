"""Loader, image cache, samplers and prefetching: what a batch contains, and what it must not depend on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchword.config import AugmentConfig
from patchword.data.formats.image_folder import open_folder
from patchword.data.loader import DETAIL, ImageCache, Loader, limit_detail
from patchword.data.preprocess import HALF, Preprocess
from patchword.data.sampler import BalancedSampler, ShuffledSampler
from patchword.data.sources import Source, from_arrays
from patchword.errors import DataError, ImageError

PREPROCESS = Preprocess((8, 8), mean=HALF, std=HALF)


@pytest.fixture
def photos(tmp_path: Path) -> Source:
    """Eight images of 12 x 16 pixels in two classes; the image with the index 2 is damaged."""
    for index in range(8):
        path = tmp_path / f"{'ab'[index // 4]}/{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (16, 12), (index * 30, 0, 0)).save(path)
    (tmp_path / "a/2.png").write_bytes(b"damaged")
    return open_folder(tmp_path).splits["train"]


def arrays(count: int = 10) -> Source:
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return from_arrays(images, np.arange(count) % 2)


def test_eval_batches_are_in_order_and_skip_unreadable_images(photos: Source) -> None:
    loader = Loader(photos, PREPROCESS)
    batches = list(loader.eval_batches(3))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1], [3, 4, 5], [6, 7]]
    assert [batch.targets.tolist() for batch in batches] == [[0, 0], [0, 1, 1], [1, 1]]
    assert batches[1].images.shape == (3, 3, 8, 8)
    assert batches[1].images[1, 0, 0, 0] == pytest.approx(120 / 255 * 2 - 1)
    assert list(loader.unreadable) == [2]


def test_batches_without_readable_images_are_skipped(photos: Source) -> None:
    loader = Loader(photos, PREPROCESS)
    assert list(loader.eval_batches(1, np.array([2]))) == []
    assert list(loader.map_batches(lambda batch: 1, 1, np.array([2]))) == []


def test_map_batches_keeps_the_order() -> None:
    loader = Loader(arrays(), PREPROCESS)
    indices = np.array([9, 0, 4, 4, 1])
    outputs = loader.map_batches(lambda batch: batch.indices.tolist(), 2, indices)
    assert list(outputs) == [[9, 0], [4, 4], [1]]


def test_unreadable_training_image_is_replaced_by_the_next(photos: Source) -> None:
    loader = Loader(photos, PREPROCESS, sampler=ShuffledSampler(0, len(photos)))
    (batch,) = loader.train_batches([(0, 8)])
    order, _ = ShuffledSampler(0, len(photos))(0, 8)
    assert batch.indices.tolist() == [3 if index == 2 else index for index in order.tolist()]


def test_source_without_readable_images(photos: Source) -> None:
    loader = Loader(photos.subset(np.array([2])), PREPROCESS, sampler=ShuffledSampler(0, 1))
    with pytest.raises(DataError, match=r"\b1 images.*2\.png"):
        next(loader.train_batches([(0, 1)]))


@pytest.mark.parametrize("crop", ["none", "shift", "resized"])
def test_train_batches_do_not_depend_on_workers_or_batch_size(photos: Source, crop: str) -> None:
    config = AugmentConfig(crop=crop, flip=0.5, color_jitter=0.3)  # type: ignore[arg-type]

    def load(num_workers: int, batch_size: int, cache_gib: float) -> torch.Tensor:
        sampler = ShuffledSampler(3, len(photos))
        loader = Loader(
            photos, PREPROCESS, sampler=sampler, augment=config, num_workers=num_workers, cache_gib=cache_gib
        )
        ranges = [(start, start + batch_size) for start in range(0, 24, batch_size)]
        return torch.cat([batch.images for batch in loader.train_batches(ranges)])

    expected = load(0, 24, 0.0)
    assert torch.equal(load(2, 4, 0.0), expected)
    assert torch.equal(load(3, 8, 1.0), expected)


def test_mixed_targets_are_probabilities() -> None:
    source = arrays()
    loader = Loader(source, PREPROCESS, sampler=ShuffledSampler(0, 10), augment=AugmentConfig(mixup=0.5))
    (batch,) = loader.train_batches([(0, 10)])
    assert batch.targets.shape == (10, 2)
    torch.testing.assert_close(batch.targets.sum(dim=1), torch.ones(10))


def test_arrays_of_the_model_size_are_not_copied() -> None:
    cache = ImageCache(arrays(), PREPROCESS, full_images=False, max_bytes=0)
    assert cache.tensor is not None
    assert cache.tensor.shape == (10, 8, 8, 3)
    assert ImageCache(arrays(), PREPROCESS, full_images=True, max_bytes=0).tensor is None


def test_cache_decodes_once_until_it_is_full(photos: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = photos.read
    monkeypatch.setattr(photos, "read", lambda index, **options: (reads.append(index), read(index, **options))[1])
    cache = ImageCache(photos, PREPROCESS, full_images=False, max_bytes=2 * 8 * 8 * 3)
    for _ in range(2):
        for index in (0, 1, 3):
            assert cache[index].shape == (8, 8, 3)
        with pytest.raises(ImageError):
            cache[2]
    assert reads == [0, 1, 3, 2, 3]  # the third image does not fit; the damaged one is not tried again


def test_limit_detail() -> None:
    large, small = Image.new("RGB", (400, 200)), Image.new("RGB", (10, 9))
    assert limit_detail(large, (16, 16)).size == (40, 20)
    assert limit_detail(large, (16, 16)).height == 16 * DETAIL
    assert limit_detail(small, (16, 16)) is small


def test_sampler_positions_cross_epochs() -> None:
    sampler = ShuffledSampler(1, 5)
    indices, keys = sampler(3, 12)
    pieces = [sampler(3, 5), sampler(5, 10), sampler(10, 12)]
    assert indices.tolist() == np.concatenate([piece[0] for piece in pieces]).tolist()
    assert keys.tolist() == np.concatenate([piece[1] for piece in pieces]).tolist()
    assert sorted(indices[2:7].tolist()) == list(range(5))
    assert len(set(keys.tolist())) == 9


def test_balanced_sampler_draws_every_class_equally_often() -> None:
    targets = np.array([0] * 90 + [1] * 9 + [2])
    indices, _ = BalancedSampler(0, targets)(0, 300)
    assert np.bincount(targets[indices]).tolist() == [102, 99, 99]


def test_balanced_sampler_of_multi_label_data_ignores_unused_classes() -> None:
    targets = np.zeros((40, 3), np.float32)
    targets[:30, 0] = 1
    targets[30:, 2] = 1
    indices, _ = BalancedSampler(0, targets)(0, 40)
    assert (indices >= 30).sum() == 20
