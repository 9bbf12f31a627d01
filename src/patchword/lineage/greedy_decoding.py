"""Greedy decoding: a model writes the most probable token, reads it, and continues until it writes <eos>.

A model that is given the true tokens before each token (teacher forcing) may have a low loss and still fail as soon as
it must build on its own. So accuracy is that of greedy decoding: a sequence counts if every token is right.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .recurrent import RecurrentSeq2Seq
from .tasks import Task
from .transformer import Transformer
from .vocabulary import EOS, SOS

Model = RecurrentSeq2Seq | Transformer
TEST_BATCH = 250


@dataclass(frozen=True)
class Alignment:
    """What the decoder attended to while it wrote a sequence: weights (target tokens, source tokens)."""

    source: tuple[str, ...]
    output: tuple[str, ...]
    weights: list[list[float]]


def evaluate_greedy(model: Model, task: Task) -> tuple[float, dict[int, float]]:
    """Fraction of the test set that greedy decoding writes without a mistake: of all, and by source length."""
    right: dict[int, list[bool]] = {}
    tests = sorted(task.test, key=lambda pair: len(pair[0]))  # batches of similar lengths
    for start in range(0, len(tests), TEST_BATCH):
        batch = tests[start : start + TEST_BATCH]
        outputs, _ = greedy(model, task, [source for source, _ in batch], max(len(target) for _, target in batch) + 1)
        for (source, target), output in zip(batch, outputs, strict=True):
            right.setdefault(len(source), []).append(output == target)
    every = [each for group in right.values() for each in group]
    return float(np.mean(every)), {length: float(np.mean(group)) for length, group in sorted(right.items())}


@torch.inference_mode()
def greedy(
    model: Model, task: Task, sources: list[tuple[str, ...]], max_length: int
) -> tuple[list[tuple[str, ...]], Tensor | None]:
    """Writes the most probable token at each step, until all sequences have ended or are too long.

    Returns:
        The outputs, and the attention weights (B, T, S) if the model attends.
    """
    source, lengths = task.source.encode(sources)
    context, token = model.start(source, lengths), torch.full((len(sources),), SOS)
    tokens: list[Tensor] = []
    weights: list[Tensor | None] = []
    ended = torch.zeros(len(sources), dtype=torch.bool)
    while not ended.all() and len(tokens) < max_length:
        logits, attended, context = model.step(token, context)  # type: ignore[arg-type]  # its own context
        token = logits.argmax(dim=-1)
        ended |= token == EOS
        tokens.append(token)
        weights.append(attended)
    outputs = [task.target.decode(row) for row in torch.stack(tokens, dim=1).tolist()]
    return outputs, None if weights[0] is None else torch.stack(weights, dim=1)  # type: ignore[arg-type]


def align(model: Model, task: Task, source: tuple[str, ...]) -> Alignment:
    """What an attending model wrote for a source, and what it attended to."""
    outputs, weights = greedy(model, task, [source], 3 * len(source))
    assert weights is not None
    output = outputs[0]
    rows = weights[0, : len(output), : len(source)]
    return Alignment(source, output, [[round(weight, 4) for weight in row] for row in rows.tolist()])
