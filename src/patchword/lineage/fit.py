"""Trains a sequence-to-sequence model on a task. In training, it is given the true tokens before each token."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import JsonConfig
from ..errors import TrainingError
from .greedy_decoding import Model, evaluate_greedy
from .recurrent import RecurrentSeq2Seq
from .tasks import Pair, Task, make_task
from .transformer import Transformer
from .vocabulary import PAD, SOS


@dataclass(frozen=True)
class TextConfig(JsonConfig):
    """A model, its task and how it is trained."""

    section = "text"

    task: Literal["reverse", "sort", "numerals", "dates", "spelling"] = "reverse"
    """The task (tasks.py)."""
    min_length: int = 4
    """Number of letters of the shortest string of "reverse" and "sort"."""
    max_length: int = 24
    """Number of letters of the longest string."""
    model: Literal["rnn", "gru", "lstm", "transformer"] = "lstm"
    """A recurrent network with this cell, or a Transformer."""
    attention: bool = True
    """Whether a recurrent decoder attends to the encoder's states; a Transformer always does."""
    dim: int = 128
    """Width of tokens or hidden states."""
    depth: int = 2
    """Number of layers of a Transformer's encoder, and of its decoder."""
    num_heads: int = 4
    """Number of attention heads of a Transformer."""
    pre_norm: bool = False
    """Whether a Transformer has norms before its branches instead of after the sums."""
    positions: bool = True
    """Whether a Transformer has position encodings."""
    lr: float = 2e-3
    """Learning rate of Adam, which decreases linearly to zero."""
    warmup_fraction: float = 0.05
    """Fraction of the training over which the learning rate increases from zero."""
    clip_grad_norm: float | None = 1.0
    """Largest norm of the gradient; by default 1, None turns clipping off."""
    batch_size: int = 128
    """Pairs per step."""

    def validate(self) -> None:
        self.check_range(1, 4096, "dim", "batch_size")
        self.check_range(1, 64, "depth", "num_heads", "min_length", "max_length")
        self.check("dim", self.dim % 2 == 0 and self.dim % self.num_heads == 0, "even, and divisible by num_heads")
        self.check("lr", self.lr > 0, "above 0")


@dataclass(frozen=True)
class FitResult:
    """A trained model, and how well it does on the test set.

    Attributes:
        model: The model, in evaluation mode.
        accuracy: Fraction of the test sequences that are written without a mistake.
        by_length: That fraction by the number of source tokens.
        steps: Number of steps.
        seconds: Time of training, without the test.
        loss: Mean cross-entropy per token of the last hundred batches.
    """

    model: Model
    accuracy: float
    by_length: dict[int, float]
    steps: int
    seconds: float
    loss: float


def make_model(config: TextConfig, seed: int) -> Model:
    """Makes the model of a config, with random weights."""
    torch.manual_seed(seed)
    task = make_task(config.task, config.min_length, config.max_length)
    sizes = len(task.source), len(task.target), config.dim
    if config.model == "transformer":
        return Transformer(*sizes, config.depth, config.num_heads, pre_norm=config.pre_norm, positions=config.positions)
    return RecurrentSeq2Seq(*sizes, config.model, config.attention)


def batch_loss(model: Model, task: Task, pairs: list[Pair]) -> Tensor:
    """Mean cross-entropy per target token, with teacher forcing."""
    source, lengths = task.source.encode([source for source, _ in pairs])
    target, _ = task.target.encode([target for _, target in pairs])
    given = F.pad(target[:, :-1], (1, 0), value=SOS)  # <sos> and all tokens but the last
    return F.cross_entropy(model(source, lengths, given).flatten(0, 1), target.flatten(), ignore_index=PAD)


def lr_factor(config: TextConfig, progress: float) -> float:
    """Linear warm-up, then linear decrease to zero; `progress` is between 0 and 1."""
    warmup = config.warmup_fraction
    return progress / warmup if progress < warmup else (1 - progress) / (1 - warmup)


class TextTrainer:
    """A model in training: each step draws new pairs, whose choice depends on the seed and the step only."""

    def __init__(self, config: TextConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.task = make_task(config.task, config.min_length, config.max_length)
        self.model = make_model(config, seed).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), config.lr, betas=(0.9, 0.98), eps=1e-9)
        self.losses: list[float] = []

    def step(self, progress: float) -> None:
        """Trains on one batch; `progress`, between 0 and 1, sets the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * lr_factor(self.config, progress)
        pairs = self.task.draw(np.random.default_rng([self.seed, len(self.losses)]), self.config.batch_size)
        loss = batch_loss(self.model, self.task, pairs)
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad_norm)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        if not np.isfinite(self.losses[-1]):
            raise TrainingError(f"The loss is {self.losses[-1]} at step {len(self.losses)}.", code="not_finite")


def fit(
    config: TextConfig,
    seed: int = 0,
    steps: int | None = None,
    seconds: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> FitResult:
    """Trains a model for a number of steps or seconds, and evaluates it.

    With `steps`, the result depends on the config and the seed only.

    Raises:
        TrainingError: The loss is NaN or infinite (code "not_finite").
    """
    trainer, started = TextTrainer(config, seed), now()
    if steps is not None:
        for step in range(steps):
            trainer.step((step + 0.5) / steps)
    elif seconds is not None:
        while (spent := now() - started) < seconds:
            trainer.step(spent / seconds)
    seconds = now() - started
    accuracy, by_length = evaluate_greedy(trainer.model.eval(), trainer.task)
    loss = float(np.mean(trainer.losses[-100:]))
    return FitResult(trainer.model, accuracy, by_length, len(trainer.losses), seconds, loss)


def initial_gradients(config: TextConfig, seed: int) -> list[float]:
    """Gradient norm of each encoder and decoder layer of a new Transformer, on one batch (Xiong et al., 2020)."""
    task = make_task(config.task, config.min_length, config.max_length)
    model = make_model(config, seed)
    assert isinstance(model, Transformer)
    batch_loss(model, task, task.draw(np.random.default_rng([seed, 0]), config.batch_size)).backward()
    layers = [*model.encoder, *model.decoder]
    return [float(torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()) for layer in layers]
