"""A running average of the weights, which usually classifies better than the weights themselves."""

import copy

import torch
from torch import nn


class Average:
    """`model` is what is evaluated; early on the average is short, so that it forgets the initial weights.

    All but a share of them, if that is wanted: half way between weights that have seen much and what a few thousand
    pictures make of them is often better than either end.
    """

    def __init__(self, model: nn.Module, decay: float, init_weight: float = 0.0) -> None:
        self.model, self.decay, self.init_weight = copy.deepcopy(model).requires_grad_(False).eval(), decay, init_weight
        weights = self.model.state_dict() if init_weight else {}
        self.start = {name: t.clone() for name, t in weights.items() if t.is_floating_point()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Weights, and batch norm's statistics, which are noisy, too. Masks are not saved, and stay as they are."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, values = self.model.state_dict(), model.state_dict()
        moving = [name for name, average in averages.items() if average.is_floating_point()]
        towards = [values[name] for name in moving]
        if self.init_weight:  # an average of mixtures is the mixture of the average
            towards = list(torch._foreach_lerp(towards, [self.start[n] for n in moving], self.init_weight))
        torch._foreach_lerp_([averages[name] for name in moving], towards, weight)
        for name in averages.keys() - set(moving):
            averages[name].copy_(values[name])

    @torch.no_grad()
    def mixed(self, init_weight: float) -> nn.Module:
        """What `model` would be with another share of the start."""
        further = (init_weight - self.init_weight) / (1 - self.init_weight)
        made = copy.deepcopy(self.model)
        weights = made.state_dict()
        torch._foreach_lerp_([weights[name] for name in self.start], list(self.start.values()), further)
        return made
