"""Trains the GAN of gan.py, and measures how far its samples are from real images.

    L_D = E[D(G(z))] - E[D(x)] + lambda E[(|grad D(x')| - 1)^2],  x' = m x + (1 - m) G(z)     WGAN-GP
    L_G = -E[D(G(z))]

D learns to tell images from samples: E[D(x)] - E[D(G(z))] is as large as it can be while the slope of D is at most 1,
which makes it the distance from one distribution to the other (Arjovsky et al., 2017). The gradient penalty keeps the
slope near 1 between images and samples (Gulrajani et al., 2017). G makes the distance smaller.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import TrainingError
from ..training.ema import ModelEma
from .gan import GanConfig, Generator, augment, make_discriminator

BETAS = (0.0, 0.99)  # of Adam, as in the paper: momentum would keep G running after D has turned
WARMUP, DECAY = 0.01, 0.5  # fractions of the training in which the learning rate rises, and falls to zero
NUM_SAMPLES = 1000  # that are measured

Watch = Callable[[int, Tensor], None]
"""Called with the number of steps and samples (1000, 1, 8, 8), always of the same noise."""


@dataclass(frozen=True)
class FittedGan:
    """A trained generator.

    Attributes:
        generator: The average of its weights over the last steps (EMA), in evaluation mode.
        samples: Images (1000, 1, 8, 8) between -1 and 1.
        steps: Number of steps.
        seconds: Time of training, with that of `watch`.
    """

    generator: nn.Module
    samples: Tensor
    steps: int
    seconds: float


class GanTrainer:
    """A GAN in training; weights and random numbers depend on the config, the images and the seed only.

    Attributes:
        generator: The weights that are trained.
        critic: The discriminator.
        ema: The average of the generator's weights.
        steps: Number of steps so far.
    """

    def __init__(self, config: GanConfig, images: Tensor, seed: int) -> None:
        self.config, self.images, self.steps = config, images, 0
        self.rng = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.generator, self.critic = Generator(config), make_discriminator(config)
        self.ema = ModelEma(self.generator, config.ema)
        self.optimizers = [torch.optim.Adam(m.parameters(), betas=BETAS) for m in (self.generator, self.critic)]
        self.noise = self.draw_noise(NUM_SAMPLES)

    def draw_noise(self, count: int) -> Tensor:
        """Normal noise (count, Z)."""
        return torch.randn(count, self.config.noise_dim, generator=self.rng)

    def samples(self) -> Tensor:
        """Images of the averaged generator, always of the same noise."""
        with torch.no_grad():
            return self.ema.model(self.noise)

    def step(self, progress: float) -> None:
        """Trains D, then G, on one batch; `progress`, between 0 and 1, sets the learning rate.

        Raises:
            TrainingError: A loss is NaN or infinite (code "not_finite").
        """
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.config.lr * min(1.0, progress / WARMUP, (1 - progress) / DECAY)
        count = self.config.batch_size
        real = self.images[torch.randint(len(self.images), (count,), generator=self.rng)]
        fake = self.generator(self.draw_noise(count))  # (B, 1, 8, 8), the same for both losses
        losses = self.train_critic(real, fake.detach()), self.train_generator(fake)
        self.ema.update(self.generator, self.steps)
        self.steps += 1
        if not np.isfinite(losses).all():
            raise TrainingError(f"The losses of D and G are {losses} at step {self.steps}.", code="not_finite")

    def train_critic(self, real: Tensor, fake: Tensor) -> float:
        """Updates D, and returns L_D."""
        real, fake = self.augment(torch.cat([real, fake])).chunk(2)
        real_logits, fake_logits = self.critic(torch.cat([real, fake])).chunk(2)  # (B, 1) each
        loss = fake_logits.mean() - real_logits.mean()
        if self.config.penalty:
            mix = torch.rand(len(real), 1, 1, 1, generator=self.rng)
            loss = loss + self.config.penalty * gradient_penalty(self.critic, real, fake, mix)
        update(self.optimizers[1], loss)
        return float(loss.detach())

    def train_generator(self, fake: Tensor) -> float:
        """Updates G through D, whose weights stay, and returns L_G."""
        self.critic.requires_grad_(False)
        loss = -self.critic(self.augment(fake)).mean()
        update(self.optimizers[0], loss)
        self.critic.requires_grad_(True)
        return float(loss.detach())

    def augment(self, images: Tensor) -> Tensor:
        """Augments images at random."""
        return augment(images, self.config.shift, self.config.cutout, self.rng)


def fit_gan(
    config: GanConfig,
    images: Tensor,
    seed: int = 0,
    steps: int | None = None,
    seconds: float | None = None,
    now: Callable[[], float] = time.monotonic,
    watch: Watch | None = None,
    num_watched: int = 8,
) -> FittedGan:
    """Trains a GAN on images (N, 1, 8, 8) between -1 and 1, for a number of steps or seconds.

    With `steps`, the result depends on the config, the images and the seed only. Before the first step, after the last
    one and at even distances between them, `watch` gets the samples: `num_watched` + 1 times.

    Raises:
        TrainingError: A loss is NaN or infinite (code "not_finite").
    """
    trainer, started, progress, watched = GanTrainer(config, images, seed), now(), 0.0, 0
    while progress < 1:
        if watch is not None and progress * num_watched >= watched:
            watch(trainer.steps, trainer.samples())
            watched += 1
        trainer.step(progress)
        if steps is not None:
            progress = trainer.steps / steps
        elif seconds is not None:
            progress = (now() - started) / seconds
    samples = trainer.samples()
    if watch is not None:
        watch(trainer.steps, samples)
    return FittedGan(trainer.ema.model, samples, trainer.steps, now() - started)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Takes a step down the gradient of the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """E[(|grad D(x')| - 1)^2] at x' = m x + (1 - m) G(z), with a number m of `mix` (B, 1, 1, 1) for each pair."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
        logits = critic(between)  # (B, 1): each image affects its own logit only, so the sum has all gradients
        (gradient,) = torch.autograd.grad(logits.sum(), between, create_graph=True)  # (B, 1, 8, 8)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^1/2) of two sets of features (N, D) (Heusel et al., 2017).

    The distance of two normal distributions with the means and covariances of the features.
    """
    x, y = first.double().numpy(), second.double().numpy()
    c1, c2 = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    values, vectors = np.linalg.eigh(c1)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T  # C1^1/2; C1 C2 has the eigenvalues of root C2 root
    cross = np.sqrt(np.linalg.eigvalsh(root @ c2 @ root).clip(0)).sum()
    return float(np.square(x.mean(0) - y.mean(0)).sum() + np.trace(c1) + np.trace(c2) - 2 * cross)


def nearest_distances(images: Tensor, others: Tensor) -> Tensor:
    """Distance of each image (B, 1, H, W) to the nearest of other images, in pixels: (B,)."""
    return torch.cdist(images.flatten(1), others.flatten(1)).amin(dim=1)
