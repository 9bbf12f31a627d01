"""A running average of the weights, which usually classifies better than the weights themselves."""

import copy

import torch
from torch import nn


class Average:
    """`model` is what is evaluated; early on the average is short, so that it forgets the initial weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Weights, and batch norm's statistics, which are noisy, too. Masks are not saved, and stay as they are."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, values = self.model.state_dict(), model.state_dict()
        moving = [name for name, average in averages.items() if average.is_floating_point()]
        torch._foreach_lerp_([averages[name] for name in moving], [values[name] for name in moving], weight)
        for name in averages.keys() - set(moving):
            averages[name].copy_(values[name])
