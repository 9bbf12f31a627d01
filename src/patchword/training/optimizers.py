"""Optimizers: AdamW, SGD with momentum, Muon; parameter groups with their own learning rate and weight decay; SAM.

AdamW and SGD are torch's fused implementations. Muon is our own: torch's computes in bfloat16, which crashes on some
processors that advertise it. Ours uses the precision of the run and three Newton-Schulz iterations instead of five.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import OptimConfig
from ..config.train import Precision

# Odd polynomials of fifth order (a x + b x^3 + c x^5), one per iteration. Each is the minimax approximation of 1 on the
# interval to which the iterations before it have mapped the singular values 0.02..1. The last maps to 0.91..1.09.
NEWTON_SCHULZ_COEFFICIENTS = ((7.7110, -22.1138, 16.2487), (3.2153, -2.4112, 0.5013), (2.2183, -1.5940, 0.4107))

# Position embeddings, wherever they are: added to tokens, biases of attention scores, rotary frequencies, in ResNets.
POSITIONS = re.compile(r"^positions\.|\.attention\.(bias|rotary)\.|^stages\..*\.relative_")

ParamGroup = dict[str, Any]


def make_optimizers(model: nn.Module, config: OptimConfig, precision: Precision = "fp32") -> list[Optimizer]:
    """Make one or two optimizers, with a parameter group for each combination of learning rate and weight decay.

    Args:
        model: Only parameters that require a gradient are optimized.
        config: Which optimizer, with its hyperparameters. Each group keeps its peak learning rate as "peak_lr".
        precision: The precision of Muon's matmuls.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if config.name == "sgd":
        groups = make_param_groups(model, named, config, config.lr)
        is_sharded = any(hasattr(p, "to_local") for _, p in named)  # torch's fused SGD knows no sharded tensors
        return [torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=not is_sharded)]
    matrices = [(n, p) for n, p in named if config.name == "muon" and is_hidden_matrix(n, p)]
    muon_names = {n for n, _ in matrices}
    rest = make_param_groups(model, [(n, p) for n, p in named if n not in muon_names], config, config.lr)
    optimizers: list[Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, fused=True))
    if matrices:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        groups = []
        for num_maps in (1, 3):
            named = [(n, p) for n, p in matrices if num_fused_maps(n) == num_maps]
            groups += [
                {**group, "num_maps": num_maps} for group in make_param_groups(model, named, config, config.muon_lr)
            ]
        optimizers.append(Muon(groups, config.momentum, dtype))
    return optimizers


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon optimizes the parameter: matrices between hidden layers, not embeddings, heads or vectors."""
    hidden = re.search(r"(^|\.)(blocks|stages|stem)\.\d", name)
    return parameter.ndim >= 2 and hidden is not None and not POSITIONS.search(name)


def num_fused_maps(name: str) -> int:
    """Return how many linear maps a weight stacks: query, key and value share one."""
    return 3 if ".qkv." in name else 1


def make_param_groups(
    model: nn.Module, named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, peak_lr: float
) -> list[ParamGroup]:
    """Group parameters by learning rate (layer decay, head scale) and weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    depth = len(getattr(model, "blocks", ()))
    for name, parameter in named:
        is_head = name.startswith(("head", "pre_logits"))
        scale = config.head_lr_scale if is_head else config.layer_decay ** (depth + 1 - layer_index(name, depth))
        decay = config.weight_decay if has_weight_decay(name, parameter) else 0.0
        groups.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": 0.0, "peak_lr": peak_lr * scale, "weight_decay": decay}
        for (scale, decay), parameters in groups.items()
    ]


def layer_index(name: str, depth: int) -> int:
    """Return 0 for parameters before the blocks, 1 for the first block, depth + 1 for parameters after the last."""
    if match := re.match(r"blocks\.(\d+)\.", name):
        return int(match[1]) + 1
    return depth + 1 if name.startswith(("norm.", "pool.", "pre_logits", "head")) else 0


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to biases, norms, tokens and position embeddings."""
    tokens = ("class_token", "distillation_token", "registers", "pool.probe")
    return parameter.ndim >= 2 and not name.startswith(tokens) and not POSITIONS.search(name)


class Muon(Optimizer):
    """Momentum with orthogonalized updates (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    A weight that stacks several maps is orthogonalized map by map ("num_maps" of its group). Convolutions are
    flattened to matrices.
    """

    def __init__(self, groups: list[ParamGroup], momentum: float = 0.95, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(groups, {"momentum": momentum, "num_maps": 1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = [self.nesterov_update(p, group["momentum"]) for p in parameters]
            for p, update in zip(parameters, orthogonalize(updates, self.dtype, group["num_maps"]), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])

    def nesterov_update(self, p: Tensor, momentum: float) -> Tensor:
        """Update the momentum buffer, and return the gradient with Nesterov momentum."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        assert p.grad is not None
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)


def orthogonalize(updates: list[Tensor], dtype: torch.dtype = torch.float32, num_maps: int = 1) -> list[Tensor]:
    """Set the singular values of each update to about one, scaled so that one learning rate suits all shapes.

    Args:
        updates: Matrices; convolutions are flattened. Updates of equal shape are computed in one batch.
        dtype: The precision of the matmuls.
        num_maps: How many maps each update stacks: along its rows, or along the first of three dimensions.
    """
    results: list[Tensor | None] = [None] * len(updates)
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, update in enumerate(updates):
        columns = update.shape[-1] if update.ndim == 3 else update[0].numel()
        rows = update.numel() // columns
        by_shape.setdefault((rows, columns), []).append(i)
    for (rows, columns), indices in by_shape.items():
        stack = torch.stack([updates[i].reshape(num_maps, rows // num_maps, columns) for i in indices]).flatten(0, 1)
        scale = max(1.0, rows / num_maps / columns) ** 0.5
        batch = (newton_schulz(stack.to(dtype)).float() * scale).reshape(len(indices), rows, columns)
        for i, matrix in zip(indices, batch, strict=True):
            results[i] = matrix.reshape(updates[i].shape)
    return [result for result in results if result is not None]


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices (B, M, N) with the same singular vectors and singular values of about one, in x's dtype."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for iteration, (a, b, c) in enumerate(NEWTON_SCHULZ_COEFFICIENTS):
        gram = x @ x.mT
        if iteration == 0:  # the norm of the Gram matrix bounds the singular values more tightly than x's norm
            bound = 1.01 * gram.norm(dim=(-2, -1), keepdim=True).sqrt() + 1e-7  # 1.01: gram is rounded
            x, gram = x / bound, gram / bound.square()
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    """Set every group's learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


class SAM:
    """Sharpness-aware minimization (Foret et al. 2021, https://arxiv.org/abs/2010.01412).

    `perturb` moves the weights uphill to where the second gradient is taken; `restore` undoes that bit for bit.
    """

    def __init__(self, parameters: list[nn.Parameter], rho: float) -> None:
        self.parameters, self.rho = parameters, rho
        self.original: list[Tensor] = []

    @torch.no_grad()
    def perturb(self, grad_norm: float) -> None:
        """Move the weights by `rho` along the gradient."""
        self.original = [p.clone() for p in self.parameters]
        for p in self.parameters:
            if p.grad is not None:
                p.add_(p.grad, alpha=self.rho / (grad_norm + 1e-12))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back."""
        for p, original in zip(self.parameters, self.original, strict=True):
            p.copy_(original)
        self.original = []
