"""A running average of the weights, which usually classifies better than the weights themselves."""

import copy

import torch
from torch import Tensor, nn


class Average:
    """`model` is what is evaluated; early on the average is short, so that it forgets the initial weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages: list[Tensor] = list(self.model.parameters())
        values: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(averages, values, weight)
        for average, value in zip(self.model.buffers(), model.buffers(), strict=True):
            if average.is_floating_point():  # batch norm's statistics of a few batches are noisy, too
                average.lerp_(value, weight)
            else:
                average.copy_(value)
