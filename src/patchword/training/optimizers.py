"""How weights follow gradients: AdamW, SGD with momentum, Muon; groups with their own rates and decay; SAM.

torch's own AdamW and SGD do the work in one fused pass. Muon is ours: torch's computes in bfloat16, which some
processors announce and then die of; ours in the precision of the run, and in three rounds instead of five.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import OptimConfig
from ..config.train import Precision

# Odd polynomials of fifth order (a x + b x^3 + c x^5), one for each round. Each is the one nearest to 1, in its largest
# error, on the interval into which the rounds before have brought the singular values 0.02..1: 0.91..1.09 in the end.
ROUNDS = ((7.7110, -22.1138, 16.2487), (3.2153, -2.4112, 0.5013), (2.2183, -1.5940, 0.4107))


def make_optimisers(model: nn.Module, config: OptimConfig, precision: Precision = "fp32") -> list[Optimizer]:
    """One or two optimisers, with a group for each combination of rate and decay; groups have their peak as "peak".

    Args:
        precision: of Muon's products; it must have been seen to work here.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if config.name == "sgd":
        groups = make_groups(model, named, config, config.lr)
        return [torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)]
    matrices = [(n, p) for n, p in named if config.name == "muon" and is_hidden_matrix(n, p)]
    chosen = {n for n, _ in matrices}
    rest = make_groups(model, [(n, p) for n, p in named if n not in chosen], config, config.lr)
    made: list[Optimizer] = []
    if rest:
        made.append(torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, fused=True))
    if matrices:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        groups = []
        for maps in (1, 3):
            named = [(n, p) for n, p in matrices if maps_of(n) == maps]
            groups += [{**group, "maps": maps} for group in make_groups(model, named, config, config.muon_lr)]
        made.append(Muon(groups, config.momentum, dtype))
    return made


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Muon is for the maps between hidden layers: not for embeddings, heads, and what is no matrix."""
    return parameter.ndim >= 2 and bool(re.search(r"(^|\.)(blocks|stages|stem)\.\d", name)) and "relative" not in name


def maps_of(name: str) -> int:
    """How many maps a matrix holds, one below the other: queries, keys and values come out of one product."""
    return 3 if ".qkv." in name else 1


def make_groups(
    model: nn.Module, named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, peak: float
) -> list[dict[str, Any]]:
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    depth = len(getattr(model, "blocks", ()))
    for name, parameter in named:
        head = name.startswith(("head", "pre_logits"))
        scale = config.head_lr_scale if head else config.layer_decay ** (depth + 1 - layer_of(name, depth))
        decay = config.weight_decay if decays(name, parameter) else 0.0
        groups.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": 0.0, "peak": peak * scale, "weight_decay": decay}
        for (scale, decay), parameters in groups.items()
    ]


def layer_of(name: str, depth: int) -> int:
    """0 for what lies before the blocks, 1 for the first block, depth + 1 for what lies after the last."""
    if match := re.match(r"blocks\.(\d+)\.", name):
        return int(match[1]) + 1
    return depth + 1 if name.startswith(("norm", "pool", "pre_logits", "head")) else 0


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices do; biases, norms, tokens and positions are few and have no reason to be small."""
    small = ("positions", "class_token", "distillation_token", "registers", "pool.probe")
    return parameter.ndim >= 2 and not name.startswith(small) and not name.endswith("relative")


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalised before the step, so that all directions learn at the same pace.

    A matrix that is several maps in one is treated as several ("maps" of its group). Convolutions are flattened.
    """

    def __init__(
        self, groups: list[dict[str, Any]], momentum: float = 0.95, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "maps": 1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = [self.momentum_of(p, group["momentum"]) for p in parameters]
            for p, update in zip(parameters, orthogonalised(updates, self.dtype, group["maps"]), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])

    def momentum_of(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the gradient, looked at from where the momentum is about to carry the weights."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        assert p.grad is not None
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)


def orthogonalised(updates: list[Tensor], dtype: torch.dtype = torch.float32, maps: int = 1) -> list[Tensor]:
    """Each update with its singular values near one, scaled so that a rate suits all shapes; computed in `dtype`.

    Args:
        maps: how many each update holds, one below the other, or, of three dimensions, one behind the other.
    """
    done: list[Tensor | None] = [None] * len(updates)
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, update in enumerate(updates):
        columns = update.shape[-1] if update.ndim == 3 else update[0].numel()
        rows = update.numel() // columns
        by_shape.setdefault((rows, columns), []).append(i)
    for (rows, columns), places in by_shape.items():
        stack = torch.stack([updates[i].reshape(maps, rows // maps, columns) for i in places]).flatten(0, 1)
        scale = max(1.0, rows / maps / columns) ** 0.5
        result = (newton_schulz(stack.to(dtype)).float() * scale).reshape(len(places), rows, columns)
        for i, each in zip(places, result, strict=True):
            done[i] = each.reshape(updates[i].shape)
    return [d for d in done if d is not None]


def newton_schulz(x: Tensor) -> Tensor:
    """Matrices (B, M, N) with the same singular vectors and singular values of about one; in the type of `x`."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for number, (a, b, c) in enumerate(ROUNDS):
        gram = x @ x.mT
        if number == 0:  # the norm of the Gram matrix bounds the singular values more tightly than that of the matrix
            bound = 1.01 * gram.norm(dim=(-2, -1), keepdim=True).sqrt() + 1e-7  # 1.01: gram is rounded
            x, gram = x / bound, gram / bound.square()
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def set_rate(optimisers: list[Optimizer], factor: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * factor


class Sharpness:
    """SAM: the gradient is taken a little way uphill, where it tells of the sharpness of the place.

    `climb` moves the weights to where the second gradient is taken, `descend` puts them back, bit for bit.
    """

    def __init__(self, parameters: list[nn.Parameter], radius: float) -> None:
        self.parameters, self.radius = parameters, radius
        self.before: list[Tensor] = []

    @torch.no_grad()
    def climb(self, norm: float) -> None:
        self.before = [p.clone() for p in self.parameters]
        for p in self.parameters:
            if p.grad is not None:
                p.add_(p.grad, alpha=self.radius / (norm + 1e-12))

    @torch.no_grad()
    def descend(self) -> None:
        for p, before in zip(self.parameters, self.before, strict=True):
            p.copy_(before)
        self.before = []
