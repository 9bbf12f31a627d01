"""Exponential moving average (EMA) of the weights, and interpolation with the initial weights (WiSE-FT)."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ModelEma:
    """Tracks the weights that are evaluated and published.

    The decay warms up with the number of steps, so that the average forgets the initial weights early. With
    `init_weight`, the average is interpolated with the initial weights: WiSE-FT (Wortsman et al. 2022,
    https://arxiv.org/abs/2109.01903), which is often more accurate than either the pretrained or the fine-tuned model.

    Args:
        model: The trained model.
        decay: The decay of the average.
        init_weight: The weight of the initial weights.
        copy_model: How a model is copied: a sharded one cannot be copied like others.

    Attributes:
        model: The averaged model.
        initial: The initial weights, if `init_weight` is not 0.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        init_weight: float = 0.0,
        copy_model: Callable[[nn.Module], nn.Module] = copy.deepcopy,
    ) -> None:
        self.copy_model, self.decay, self.init_weight = copy_model, decay, init_weight
        self.model = copy_model(model).requires_grad_(False).eval()
        weights = self.model.state_dict() if init_weight else {}
        self.initial = {name: t.clone() for name, t in weights.items() if t.is_floating_point()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Average weights and batch norm statistics; copy integer buffers. Buffers that are not saved stay as is."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        averages, values = local_state(self.model), local_state(model)
        names = [name for name, average in averages.items() if average.is_floating_point()]
        targets = [values[name] for name in names]
        if self.init_weight:  # the average of interpolations is the interpolation of the average
            targets = list(torch._foreach_lerp(targets, [local(self.initial[n]) for n in names], self.init_weight))
        torch._foreach_lerp_([averages[name] for name in names], targets, weight)
        for name in averages.keys() - set(names):
            averages[name].copy_(values[name])

    @torch.no_grad()
    def interpolate(self, init_weight: float) -> nn.Module:
        """Return a copy of `model` as it would be with another weight of the initial weights."""
        shift = (init_weight - self.init_weight) / (1 - self.init_weight)
        model = self.copy_model(self.model)
        weights = local_state(model)
        initial = [local(tensor) for tensor in self.initial.values()]
        torch._foreach_lerp_([weights[name] for name in self.initial], initial, shift)
        return model


def local_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model; of a sharded one, this process's fraction."""
    return {name: local(tensor) for name, tensor in model.state_dict().items()}


def local(tensor: Tensor) -> Tensor:
    """Return this process's fraction of a sharded tensor (a DTensor of torch); other tensors as they are."""
    sharded: Any = tensor  # not `isinstance`: importing DTensor takes a second, which only sharded runs should spend
    return sharded.to_local() if hasattr(tensor, "to_local") else tensor
