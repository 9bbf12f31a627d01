"""Trains BERT: pre-training on unlabeled text, then fine-tuning with labels.

Text here is lists of token ids of any vocabulary whose first ids are `PAD`, `CLS`, `SEP` and `MASK`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .bert import IGNORED, BertClassifier, BertConfig, MaskedLanguageModel, mask_tokens, masked_loss

PAD, CLS, SEP, MASK = range(4)
SPECIAL = (PAD, CLS, SEP, MASK)
LAST = 100  # steps over which metrics of the training are averaged
T = TypeVar("T", bound=nn.Module)


@dataclass(frozen=True)
class FitConfig:
    """How a BERT is trained: the same for pre-training and fine-tuning."""

    steps: int
    seed: int
    lr: float
    batch_size: int = 32


def make_batch(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, mask and segments, (B, N) each: [CLS] ... [SEP], padded; a [SEP] inside starts sentence B."""
    tokens = pad_sequence([torch.tensor([CLS, *tokens, SEP]) for tokens in sequences], True, PAD)
    ends = (tokens == SEP).long()
    return tokens, tokens != PAD, (ends.cumsum(dim=1) - ends).clamp(max=1)


def pretrain(
    sequences: Sequence[Sequence[int]], config: BertConfig, fit: FitConfig
) -> tuple[MaskedLanguageModel, dict[str, float]]:
    """Trains on unlabeled sequences by masked language modeling; returns the model, and its last loss and accuracy."""
    data, generator, accuracies = make_batch(sequences), torch.Generator().manual_seed(fit.seed), []

    def loss_of(model: MaskedLanguageModel, rows: Tensor) -> Tensor:
        tokens, mask, segments = (tensor[rows] for tensor in data)
        inputs, labels = mask_tokens(
            tokens, mask_token=MASK, special=SPECIAL, vocab_size=config.vocab_size, generator=generator
        )
        chosen = labels != IGNORED  # the head is needed only there
        logits = model.predict_tokens(model.bert.forward_features(inputs, mask, segments)[chosen])
        accuracies.append((logits.argmax(dim=-1) == labels[chosen]).float().mean())
        return masked_loss(logits, labels[chosen])

    model, loss = run_steps(lambda: MaskedLanguageModel(config), loss_of, len(sequences), fit)
    return model, {"loss": loss, "accuracy": torch.stack(accuracies[-LAST:]).nanmean().item()}


def finetune(
    sequences: Sequence[Sequence[int]],
    labels: Sequence[int],
    num_classes: int,
    config: BertConfig,
    fit: FitConfig,
    pretrained: MaskedLanguageModel | None = None,
) -> tuple[BertClassifier, dict[str, float]]:
    """Trains a classifier of labeled sequences, from scratch or from a pre-trained BERT; returns it and its loss."""
    (tokens, mask, segments), targets = make_batch(sequences), torch.tensor(labels)

    def build() -> BertClassifier:
        model = BertClassifier(config, num_classes)
        if pretrained is not None:  # perhaps without a pooler, which masked language modeling does not train
            model.bert.load_state_dict(pretrained.bert.state_dict(), strict=pretrained.bert.config.pooler)
        return model

    def loss_of(model: BertClassifier, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[rows], mask[rows], segments[rows]), targets[rows])

    model, loss = run_steps(build, loss_of, len(sequences), fit)
    return model, {"loss": loss}


def run_steps(
    build: Callable[[], T], loss_of: Callable[[T, Tensor], Tensor], rows: int, fit: FitConfig
) -> tuple[T, float]:
    """Trains with AdamW, warm-up and linear decay on random rows; returns the mean of the last losses, too."""
    generator, warmup, losses = torch.Generator().manual_seed(fit.seed), max(1, fit.steps // 10), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fit.seed)  # initial weights and dropout
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=fit.lr, weight_decay=0.01)
        for step in range(fit.steps):
            left = (fit.steps - step) / max(1, fit.steps - warmup)
            optimizer.param_groups[0]["lr"] = fit.lr * min((step + 1) / warmup, left)
            loss = loss_of(model, torch.randint(rows, (fit.batch_size,), generator=generator))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    return model.eval(), torch.stack(losses[-LAST:]).mean().item()


@torch.inference_mode()
def accuracy(model: nn.Module, sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> float:
    """Returns the fraction of sequences whose label is predicted."""
    return (model(*make_batch(sequences)).argmax(dim=-1) == torch.tensor(labels)).float().mean().item()
