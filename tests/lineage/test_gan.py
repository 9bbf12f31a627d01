"""TransGAN: shapes, pixel shuffle, penalty, augmentation, Frechet distance, training that repeats, and the study."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchword.errors import ConfigError, TrainingError
from patchword.lineage.gan import (
    GanConfig,
    Generator,
    augment,
    from_pixels,
    make_discriminator,
    pixel_shuffle,
    to_pixels,
)
from patchword.lineage.gan_fit import (
    GanTrainer,
    fit_gan,
    frechet_distance,
    gradient_penalty,
    nearest_distances,
)
from patchword.plots.theme import DARK, LIGHT
from patchword.studies import gan_study
from patchword.studies.gan_study import GanRun, Judge, Progress, balance, compare_to_real, gan, gan_panels
from patchword.studies.study import Cell, Length, ResultRow, Study

TINY = GanConfig(noise_dim=8, dim=32, depth=1, critic_dim=16, critic_depth=1, num_heads=2, batch_size=8)


def make_rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=make_rng(seed)) * 2 - 1


def test_pixel_shuffle_is_torchs() -> None:
    tokens = torch.randn(3, 16, 12, generator=make_rng())
    channels_first = tokens.mT.unflatten(2, (4, 4))  # (B, 12, 4, 4)
    expected = nn.PixelShuffle(2)(channels_first).flatten(2).mT  # (B, 64, 3)
    assert torch.equal(pixel_shuffle(tokens, 4), expected)


def test_shapes() -> None:
    generator, critic = Generator(TINY), make_discriminator(TINY)
    noise = torch.randn(5, 8, generator=make_rng())
    images = generator(noise)
    assert images.shape == (5, 1, 8, 8)
    assert images.abs().max() <= 1
    assert critic(images).shape == (5, 1)
    torch.testing.assert_close(generator(noise[2:3]), images[2:3])  # each image depends on its own noise only
    assert generator.coarse.positions.shape == (1, 16, 32)
    assert generator.fine.positions.shape == (1, 64, 8)


def test_relative_positions_can_be_turned_off() -> None:
    names = [[n for n, _ in Generator(TINY.replace(relative=on)).named_parameters()] for on in (True, False)]
    assert sum(name.endswith(".relative") for name in names[0]) == 2, "one table in each block"
    assert not any(name.endswith(".relative") for name in names[1])


@torch.no_grad()
def test_positions_make_the_discriminator_depend_on_the_order_of_patches() -> None:
    critic, images = make_discriminator(TINY), random_images(4)
    shuffled = images.roll(TINY.patch_size, dims=3)
    assert (critic(images) - critic(shuffled)).abs().max() > 1e-4
    for name, parameter in critic.named_parameters():
        if name.startswith("positions.") or name.endswith(".relative"):
            parameter.zero_()
    torch.testing.assert_close(critic(images), critic(shuffled))


def test_a_new_discriminator_has_a_gradient() -> None:
    images = random_images(2).requires_grad_()
    make_discriminator(TINY)(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().max() > 0


def test_gradient_penalty_of_a_linear_critic() -> None:
    """D(x) = w x has the gradient w everywhere, so the penalty is (|w| - 1)^2, whatever the images are."""
    linear = nn.Linear(64, 1)
    weight, critic = linear.weight, nn.Sequential(nn.Flatten(), linear)
    penalty = gradient_penalty(critic, random_images(4), random_images(4, 1), torch.rand(4, 1, 1, 1))
    torch.testing.assert_close(penalty, (weight.norm() - 1).square())
    (gradient,) = torch.autograd.grad(penalty, [weight])
    torch.testing.assert_close(gradient, 2 * (weight.norm() - 1) * weight / weight.norm())


class SquareCritic(nn.Module):
    """D(x) = |x|^2 / 2, whose gradient is x."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).square().sum(dim=1, keepdim=True) / 2


def test_the_gradient_penalty_is_taken_between_each_pair() -> None:
    real, fake = random_images(3), random_images(3, 1)
    mix = torch.tensor([1.0, 0.0, 0.25]).reshape(3, 1, 1, 1)
    points = torch.stack([real[0], fake[1], 0.25 * real[2] + 0.75 * fake[2]])
    expected = (points.flatten(1).norm(dim=1) - 1).square().mean()
    torch.testing.assert_close(gradient_penalty(SquareCritic(), real, fake, mix).detach(), expected)


@pytest.mark.parametrize("relative", [True, False])  # without a bias, attention would run in a fused kernel
def test_the_penalty_has_a_derivative(relative: bool) -> None:
    critic = make_discriminator(TINY.replace(relative=relative))
    gradient_penalty(critic, random_images(4), random_images(4, 1), torch.full((4, 1, 1, 1), 0.5)).backward()
    qkv = critic.get_parameter("blocks.0.attention.qkv.weight").grad
    assert qkv is not None
    assert qkv.abs().max() > 0


def test_training_with_the_penalty_keeps_the_slope_near_1() -> None:
    images, deviations = random_images(64), []
    for penalty in (0.0, 1.0):
        trainer = GanTrainer(TINY.replace(penalty=penalty, lr=3e-3), images, seed=1)
        for _ in range(30):
            trainer.step(0.3)
        mix = torch.full((64, 1, 1, 1), 0.5)
        deviations.append(gradient_penalty(trainer.critic, images, trainer.samples()[:64], mix).item())
    assert deviations[1] < 0.5
    assert deviations[1] < deviations[0] / 5


def test_augmentation_passes_gradients() -> None:
    images = random_images(16).requires_grad_()
    augment(images, 1, 3, make_rng()).sum().backward()
    assert images.grad is not None
    assert set(images.grad.unique().tolist()) == {0.0, 1.0}, "a pixel is seen, or hidden"
    assert (images.grad.flatten(1).sum(dim=1) >= 7 * 7 - 9).all()


def test_augmentation_repeats_with_the_seed() -> None:
    images = random_images(16)
    assert torch.equal(augment(images, 2, 3, make_rng(1)), augment(images, 2, 3, make_rng(1)))
    assert not torch.equal(augment(images, 2, 3, make_rng(1)), augment(images, 2, 3, make_rng(2)))
    assert torch.equal(augment(images, 0, 0, make_rng()), images)


def test_shift_moves_images_by_each_offset_within_its_bound() -> None:
    images = random_images(1).expand(300, 1, 8, 8) + 2  # no pixel is 0
    padded = nn.functional.pad(images[:1], (1, 1, 1, 1))
    crops = [padded[0, 0, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    found = [[torch.equal(image[0], crop) for crop in crops] for image in augment(images, 1, 0, make_rng())]
    assert all(sum(each) == 1 for each in found)
    assert np.all(np.sum(found, axis=0) >= 10), "all nine shifts, about 33 times each"


def test_cutout_hides_one_square_inside_the_image() -> None:
    images = torch.ones(500, 1, 8, 8)
    hidden = (augment(images, 0, 3, make_rng()) == 0)[:, 0]
    assert (hidden.sum(dim=(1, 2)) == 9).all()
    rows, columns = hidden.any(dim=2), hidden.any(dim=1)
    assert (rows.sum(dim=1) == 3).all()
    assert (columns.sum(dim=1) == 3).all()
    corners = {(int(r.byte().argmax()), int(c.byte().argmax())) for r, c in zip(rows, columns, strict=True)}
    assert corners == {(y, x) for y in range(6) for x in range(6)}


def test_both_networks_see_augmented_images_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real and generated images pass through one call for D; G's through another, with its gradient."""
    seen: list[Tensor] = []

    def record(images: Tensor, *args: Any) -> Tensor:
        seen.append(images)
        return torch.full_like(images, 0.25) + 0 * images

    inputs: list[Tensor] = []
    monkeypatch.setattr("patchword.lineage.gan_fit.augment", record)
    trainer = GanTrainer(TINY, random_images(16), seed=0)
    trainer.critic.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    trainer.step(0.5)
    assert [len(images) for images in seen] == [16, 8]
    assert [images.requires_grad for images in seen] == [False, True]
    assert all(bool((images == 0.25).all()) for images in inputs)
    assert torch.equal(seen[0][8:], seen[1].detach()), "one batch of samples serves both losses"


def test_frechet_distance_of_normal_distributions() -> None:
    """With diagonal covariances it is |m1 - m2|^2 + sum (s1 - s2)^2."""
    x = torch.randn(5000, 3, generator=make_rng(), dtype=torch.float64)
    x = x - x.mean(dim=0)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.T))).T  # exact mean 0 and covariance 1
    one, other = x * torch.tensor([1.0, 2.0, 3.0]), x * torch.tensor([2.0, 2.0, 0.5]) + torch.tensor([1.0, 0.0, -2.0])
    assert frechet_distance(one, other) == pytest.approx(5 + 1 + 0 + 6.25)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=make_rng(1), dtype=torch.float64))[0]
    assert frechet_distance(one @ turn, other @ turn) == pytest.approx(12.25), "no axis is special"


def test_nearest_distance_and_pixels() -> None:
    images = random_images(6)
    assert nearest_distances(images[:2], images).tolist() == [0, 0]
    others = torch.zeros(3, 1, 8, 8)
    others[1] = images[0]
    assert nearest_distances(images[:1] + 0.5, others).item() == pytest.approx(4), "64 pixels differ by 0.5"
    pixels = torch.arange(256, dtype=torch.uint8).reshape(4, 8, 8, 1)
    assert torch.equal(to_pixels(from_pixels(pixels)), pixels)
    assert from_pixels(pixels).shape == (4, 1, 8, 8)
    assert (float(from_pixels(pixels).min()), float(from_pixels(pixels).max())) == (-1, 1)


def test_weights_and_noise_depend_on_the_seed_only() -> None:
    trainers = []
    for seed in (1, 1, 2):
        torch.rand(1)  # changes the state of the global generator
        state = torch.get_rng_state()
        trainers.append(GanTrainer(TINY, random_images(40), seed))
        assert torch.equal(torch.get_rng_state(), state)
    first, again, other = ([t.generator.to_pixel.weight, t.critic.patch_embed.proj.weight, t.noise] for t in trainers)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_training_repeats_bit_for_bit() -> None:
    images = random_images(40)
    first, again, other = (fit_gan(TINY, images, seed, steps=6) for seed in (1, 1, 2))
    assert first.steps == 6
    assert torch.equal(first.samples, again.samples)
    assert not torch.equal(first.samples, other.samples)
    assert not torch.equal(first.samples, fit_gan(TINY, images, 1, steps=7).samples)


def test_samples_are_watched_at_even_distances_and_change_nothing() -> None:
    seen: dict[int, Tensor] = {}
    result = fit_gan(TINY, random_images(40), 1, steps=6, watch=seen.__setitem__, num_watched=3)
    assert list(seen) == [0, 2, 4, 6]
    assert torch.equal(seen[6], result.samples)
    assert seen[0].shape == (1000, 1, 8, 8)
    assert torch.equal(result.samples, fit_gan(TINY, random_images(40), 1, steps=6).samples)


def test_budget_in_seconds_uses_the_clock() -> None:
    clock = iter(range(1000))
    result = fit_gan(TINY, random_images(40), seconds=10, now=lambda: float(next(clock)))
    assert result.steps == 10
    assert result.seconds == 11


def test_divergence_is_an_error_with_a_code() -> None:
    with pytest.raises(TrainingError) as error:
        fit_gan(TINY.replace(lr=1e30), random_images(40), steps=20)
    assert error.value.code == "not_finite"


@pytest.mark.parametrize(
    "fields", [{"dim": 36}, {"critic_dim": 15}, {"patch_size": 3}, {"lr": 0.0}, {"ema": 1.0}, {"cutout": 8}]
)
def test_invalid_configs_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TINY.replace(**fields)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge.load()


@pytest.mark.slow
def test_the_classifier_recognizes_digits(judge: Judge) -> None:
    assert judge.train.shape == (1294, 8, 8, 1)
    assert judge.test.shape == (359, 8, 8, 1)
    verdict = judge(judge.test)
    assert verdict.fraction() > 0.85
    assert sum(verdict.counts()) == int((verdict.confidence > 0.9).sum())
    assert min(verdict.counts()) > 20
    assert Judge.load() is judge, "it is trained once"
    features = judge(judge.train).features
    assert 0 < judge.floor() < 0.1 * frechet_distance(features, judge(to_pixels(random_images(500))).features)


@pytest.mark.slow
def test_real_digits_and_copies_are_told_apart(judge: Judge) -> None:
    copies = compare_to_real(judge, from_pixels(judge.train[:100]))
    assert copies["nearest"] == copies["nearest_min"] == 0
    assert copies["balance"] > 0.95
    unseen = compare_to_real(judge, from_pixels(judge.test))
    assert unseen["nearest"] == unseen["nearest_real"] > 1
    assert unseen["counts"] == unseen["real_counts"]


def test_balance_of_classes() -> None:
    assert balance([7] * 10) == pytest.approx(1)
    assert balance([0, 5, 0, 0]) == 0
    assert balance([5, 5, 0, 0]) == pytest.approx(0.5)
    assert balance([0] * 10) == 0


@pytest.mark.slow
def test_short_training_comes_closer_to_digits(judge: Judge) -> None:
    progress = Progress(judge)
    images = from_pixels(judge.train)
    fit_gan(GanConfig(batch_size=16), images, steps=150, watch=progress, num_watched=1)
    start, end = progress.frechet.values()
    assert end < 0.65 * start


@pytest.mark.slow
def test_the_study(judge: Judge) -> None:
    study = gan()
    assert study.cells[0].config == GanRun(GanConfig())
    assert len({cell.name for cell in study.cells}) == len(study.cells)
    small = Study(
        **{**vars(study), "cells": (Cell("digits", "tiny", GanRun(TINY)), Cell("digits", "other", GanRun(TINY)))}
    )
    rows = [make_row(small.cells[0], seed) for seed in (0, 1)]
    rows.append(ResultRow(cell="digits_other", series="digits", x="other", seed=0, accuracy=None, diverged="NaN"))
    for row in rows[:2]:
        details = row["details"]
        assert list(details["frechet"]) == list(details["recognized"]) == [str(2 * i) for i in range(9)]
        assert row["accuracy"] == details["recognized"]["16"] == sum(details["counts"]) / 1000
        assert 0 < details["floor"] < details["frechet"]["16"]
        assert ("samples" in details) == (row["seed"] == 0)
    samples = rows[0]["details"]["samples"]
    assert list(samples) == ["0", "2", "4", "8", "16"]
    assert np.array(samples["16"]).shape == (30, 8, 8)
    assert np.array(rows[0]["details"]["real_samples"]).shape == (30, 8, 8)
    curves, mosaics = gan_panels(small, rows)
    assert (curves.name, mosaics.name) == ("gan", "gan_samples")
    assert [line[2] for line in curves.table[1:]][1] == "diverged"
    assert len({len(line) for line in curves.table}) == 1
    for theme in (LIGHT, DARK):
        left, right = curves.figure(theme).axes
        assert left.lines[0].get_xdata().tolist() == [2 * i for i in range(9)]  # type: ignore[union-attr]
        assert left.get_yscale() == "log"
        assert len(right.lines) == 2, "one cell, and real digits"
        assert len(mosaics.figure(theme).axes) == 6, "five steps, and real digits"


def make_row(cell: Cell, seed: int) -> ResultRow:
    assert isinstance(cell.config, GanRun)
    fields = cell.config.run(seed, Length(steps=16), now=lambda: 0.0)
    row: Any = {"cell": cell.name, "series": cell.series, "x": cell.x, "seed": seed, **fields}
    checked: ResultRow = row
    return checked


def test_no_panel_without_a_finished_run() -> None:
    row = ResultRow(cell="digits_TransGAN", series="digits", x="TransGAN", seed=0, accuracy=None, diverged="NaN")
    (panel,) = gan_panels(gan(), [row])
    assert panel.draw is None


def test_a_step_is_timed(judge: Judge) -> None:
    clock = iter(range(100))
    step_seconds, rest = GanRun(TINY).time_step(lambda: float(next(clock)))
    assert step_seconds == 1 / gan_study.TIMED_STEPS
    assert rest == gan_study.SETUP_SECONDS + 9
