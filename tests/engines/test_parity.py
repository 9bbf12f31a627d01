"""Parity of logits, and the sample images that it is measured on."""

import dataclasses
import json

import pytest
import torch

from patchword.data.preprocess import HALF, Preprocess
from patchword.engines.parity import (
    MAX_KL_DIVERGENCE,
    MAX_REL_DIFF,
    NUM_CHECK_IMAGES,
    Parity,
    compute_logits,
    held_out_images,
    measure_parity,
    sample_images,
    sample_photos,
)

PREPROCESS = Preprocess((16, 24), mean=HALF, std=HALF)


def test_equal_logits_have_perfect_parity() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    parity = measure_parity(logits, logits.clone())
    assert dataclasses.astuple(parity) == (6, 1.0, 0.0, 0.0, 0.0)
    assert parity.within_tolerance(exact=True)
    assert parity.within_tolerance(exact=False)


def test_differences_are_measured() -> None:
    reference = torch.tensor([[4.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 1.0]])
    logits = reference.clone()
    logits[3] = torch.tensor([1.5, 1.0])
    parity = measure_parity(reference, logits)
    assert parity.top1_agreement == 0.75
    assert parity.max_abs_diff == pytest.approx(1.5)
    assert parity.max_rel_diff == pytest.approx(1.5 / 4)
    log_p, log_q = reference[3].log_softmax(0), logits[3].log_softmax(0)
    assert parity.kl_divergence == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()) / 4, rel=1e-5)


@pytest.mark.parametrize("logits", [torch.zeros(2, 3), torch.full((2, 2), float("nan")), torch.zeros(1, 2)])
def test_wrong_shapes_and_nan_are_never_within_tolerance(logits: torch.Tensor) -> None:
    parity = measure_parity(torch.zeros(2, 2), logits)
    assert parity.top1_agreement == 0
    assert not parity.within_tolerance(exact=True)
    assert not parity.within_tolerance(exact=False)
    document = json.loads(json.dumps(parity.to_json(), allow_nan=False))
    assert document["kl_divergence"] is None


def test_exact_engines_are_judged_by_logits_and_others_by_kl_divergence() -> None:
    close = Parity(8, 1.0, 0.0, 0.01, MAX_REL_DIFF)
    far = Parity(8, 1.0, MAX_KL_DIVERGENCE, 0.5, 10 * MAX_REL_DIFF)
    farther = Parity(8, 0.9, 2 * MAX_KL_DIVERGENCE, 0.5, 10 * MAX_REL_DIFF)
    assert [p.within_tolerance(exact=True) for p in (close, far, farther)] == [True, False, False]
    assert [p.within_tolerance(exact=False) for p in (close, far, farther)] == [True, True, False]


def test_compute_logits_runs_in_batches() -> None:
    sizes = []

    def engine(pixels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pixels))
        return pixels.float().mean(dim=(1, 2))

    pixels = torch.arange(5 * 2 * 2 * 3, dtype=torch.uint8).view(5, 2, 2, 3)
    assert torch.equal(compute_logits(engine, pixels, batch_size=2), pixels.float().mean(dim=(1, 2)))
    assert sizes == [2, 2, 1]


def test_sample_images_are_reproducible_and_varied() -> None:
    first, second = sample_images(PREPROCESS, 6), sample_images(PREPROCESS, 6)
    assert torch.equal(first, second)
    assert first.shape == (6, 16, 24, 3)
    assert first.dtype == torch.uint8
    assert len({image.numpy().tobytes() for image in first}) == 6
    assert len({photo.size for photo in sample_photos(6)}) > 3


def test_no_sample_images() -> None:
    assert sample_images(PREPROCESS, 0).shape == (0, 16, 24, 3)


def test_held_out_images_do_not_calibrate() -> None:
    calibration = {image.numpy().tobytes() for image in sample_images(PREPROCESS)}
    held_out = held_out_images(PREPROCESS)
    assert len(held_out) == NUM_CHECK_IMAGES
    assert not calibration & {image.numpy().tobytes() for image in held_out}
