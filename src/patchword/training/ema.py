"""Exponential moving average (EMA) of the weights, and interpolation with the initial weights (WiSE-FT)."""

import copy

import torch
from torch import nn


class ModelEma:
    """Tracks the weights that are evaluated and published.

    The decay warms up with the number of steps, so that the average forgets the initial weights early. With
    `init_weight`, the average is interpolated with the initial weights: WiSE-FT (Wortsman et al. 2022,
    https://arxiv.org/abs/2109.01903), which is often more accurate than either the pretrained or the fine-tuned model.

    Attributes:
        model: The averaged model.
        initial: The initial weights, if `init_weight` is not 0.
    """

    def __init__(self, model: nn.Module, decay: float, init_weight: float = 0.0) -> None:
        self.model, self.decay, self.init_weight = copy.deepcopy(model).requires_grad_(False).eval(), decay, init_weight
        weights = self.model.state_dict() if init_weight else {}
        self.initial = {name: t.clone() for name, t in weights.items() if t.is_floating_point()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Average weights and batch norm statistics; copy integer buffers. Buffers that are not saved stay as is."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, values = self.model.state_dict(), model.state_dict()
        names = [name for name, average in averages.items() if average.is_floating_point()]
        targets = [values[name] for name in names]
        if self.init_weight:  # the average of interpolations is the interpolation of the average
            targets = list(torch._foreach_lerp(targets, [self.initial[n] for n in names], self.init_weight))
        torch._foreach_lerp_([averages[name] for name in names], targets, weight)
        for name in averages.keys() - set(names):
            averages[name].copy_(values[name])

    @torch.no_grad()
    def interpolate(self, init_weight: float) -> nn.Module:
        """Return a copy of `model` as it would be with another weight of the initial weights."""
        shift = (init_weight - self.init_weight) / (1 - self.init_weight)
        model = copy.deepcopy(self.model)
        weights = model.state_dict()
        torch._foreach_lerp_([weights[name] for name in self.initial], list(self.initial.values()), shift)
        return model
