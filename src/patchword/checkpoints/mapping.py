"""Rules that convert tensor names and layouts between patchword and other projects.

A tensor map has a rule for each of our modules (or bare parameters). "{}" stands for an index, such as that of a block.
A rule converts our tensor to theirs (`split`) and theirs to ours (`join`). Both only rearrange values, so a round
trip is bit-identical.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ViTConfig
from ..errors import CheckpointError, ConversionError, PatchwordError, UnknownArchitectureError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """Renames a tensor. With `parts`, slices of our first axis are stored as separate tensors with these suffixes."""

    name: str
    parts: tuple[str, ...] = ("",)
    first: int = 0  # their first index: 0 or 1

    def names(self, suffix: str, indices: Sequence[int]) -> list[str]:
        """Return their names of the tensor `suffix` ("weight", "bias" or "")."""
        base = self.name.format(*(i + self.first for i in indices))
        return [base + part + self.suffix(suffix) for part in self.parts]

    def suffix(self, suffix: str) -> str:
        """Return their name of "weight" or "bias", with its separator."""
        return f".{suffix}" if suffix else ""

    def split(self, suffix: str, tensor: Tensor, config: ViTConfig) -> list[Tensor]:
        """Convert our tensor to theirs."""
        return [self.export(suffix, t, config) for t in tensor.chunk(len(self.parts))]

    def join(self, suffix: str, tensors: list[Tensor], config: ViTConfig) -> Tensor:
        """Convert their tensors to ours."""
        return torch.cat([self.restore(suffix, t, config) for t in tensors])

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        """Convert one tensor from our layout to theirs."""
        return tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        """Convert one tensor from their layout to ours."""
        return tensor


@dataclass(frozen=True)
class Patch(Rule):
    """Our patch projection (D, C*P*P) as a convolution kernel (D, C, P, P)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor if suffix == "bias" else tensor.reshape(len(tensor), config.map_channels, *config.patch_size)

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor if suffix == "bias" else tensor.flatten(1)


@dataclass(frozen=True)
class Flax(Rule):
    """Flax names: separated by slashes, with "kernel" ("scale" in norms) for weight."""

    weight: str = "kernel"

    def suffix(self, suffix: str) -> str:
        return {"weight": f"/{self.weight}", "": ""}.get(suffix, f"/{suffix}")


@dataclass(frozen=True)
class FlaxDense(Flax):
    """A Flax dense kernel: (in, out) instead of (out, in)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.T if suffix == "weight" else tensor

    restore = export


@dataclass(frozen=True)
class FlaxConv(Flax):
    """A Flax convolution kernel: (height, width, in, out) instead of (out, in, height, width)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.permute(2, 3, 1, 0) if suffix == "weight" else tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.permute(3, 2, 0, 1) if suffix == "weight" else tensor


@dataclass(frozen=True)
class FlaxPatch(FlaxConv):
    """Our patch projection (D, C*P*P) as a Flax convolution kernel."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        if suffix == "weight":
            tensor = tensor.reshape(len(tensor), config.map_channels, *config.patch_size)
        return super().export(suffix, tensor, config)

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        tensor = super().restore(suffix, tensor, config)
        return tensor.flatten(1) if suffix == "weight" else tensor


@dataclass(frozen=True)
class FlaxHeads(Flax):
    """The Flax projection into heads: kernel (D, H, d) and bias (H, d)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        tensor = tensor.reshape(config.num_heads, -1, *tensor.shape[1:])  # (H, d[, D])
        return tensor.permute(2, 0, 1) if suffix == "weight" else tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        tensor = tensor.permute(1, 2, 0) if suffix == "weight" else tensor
        return tensor.flatten(0, 1)


@dataclass(frozen=True)
class FlaxMerge(Flax):
    """The Flax projection out of heads: kernel (H, d, D)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.T.reshape(config.num_heads, -1, len(tensor)) if suffix == "weight" else tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.flatten(0, 1).T if suffix == "weight" else tensor


@dataclass(frozen=True)
class PixelFirst(Rule):
    """Patches flattened with channels last; ours have channels first. Permutes the last axis."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return self.permute(tensor, (config.in_channels, *config.patch_size), (1, 2, 0))

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return self.permute(tensor, (*config.patch_size, config.in_channels), (2, 0, 1))

    def permute(self, tensor: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        """Permute the axes of `shape`, which are flattened in the last axis."""
        lead = tensor.shape[:-1]
        axes = [*range(len(lead)), *(len(lead) + i for i in order)]
        return tensor.reshape(*lead, *shape).permute(axes).reshape(*lead, -1)


@dataclass(frozen=True)
class Squeezed(Rule):
    """A token or table that they store without our `lead` leading axes of length 1."""

    lead: int = 1

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.reshape(tensor.shape[self.lead :])

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.reshape(*([1] * self.lead), *tensor.shape)


@dataclass(frozen=True)
class Transposed(Rule):
    """A matrix (in, out) instead of (out, in)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.T

    restore = export


@dataclass(frozen=True)
class OffsetTable(Rule):
    """Relative positions of BEiT: their (offsets, H) is our (H, 2h-1, 2w-1)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.flatten(1).T

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        rows, columns = (2 * n - 1 for n in config.grid)
        return tensor.T.reshape(-1, rows, columns)


TensorMap = dict[str, Rule]


def add_key_bias(tensors: Tensors, queries: str, keys: str) -> Tensors:
    """Add a bias of zeros to keys whose queries have one, as our fused projection needs; arguments are suffixes."""
    missing = [n for n in tensors if n.endswith(queries) and n.removesuffix(queries) + keys not in tensors]
    return {**tensors, **{n.removesuffix(queries) + keys: torch.zeros_like(tensors[n]) for n in missing}}


def remove_key_bias(tensors: Tensors, keys: str) -> Tensors:
    """The inverse of `add_key_bias`."""
    return {n: t for n, t in tensors.items() if not n.endswith(keys)}


def find_rule(tensor_map: TensorMap, ours: str) -> tuple[Rule, str, list[int]] | None:
    """Find the rule for one of our tensors; return it with "weight", "bias" or "", and the indices in the name."""
    indices = [int(i) for i in re.findall(r"(?<=\.)\d+(?=\.|$)", ours)]
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", ours)
    if pattern in tensor_map:
        return tensor_map[pattern], "", indices
    module, _, suffix = pattern.rpartition(".")
    return (tensor_map[module], suffix, indices) if module in tensor_map else None


def to_foreign(state: Tensors, config: ViTConfig, tensor_map: TensorMap, family: str) -> Tensors:
    """Convert our state dict to their names and layouts."""
    theirs: Tensors = {}
    unmapped = []
    for ours, tensor in state.items():
        match = find_rule(tensor_map, ours)
        if match is None:
            unmapped.append(ours)
            continue
        rule, suffix, indices = match
        theirs.update(zip(rule.names(suffix, indices), rule.split(suffix, tensor, config), strict=True))
    if unmapped:
        raise ConversionError(f"The {family} format cannot store {join_names(unmapped)}.")
    return theirs


def from_foreign(theirs: Tensors, config: ViTConfig, tensor_map: TensorMap, family: str, expected: Tensors) -> Tensors:
    """Convert their state dict to our names and layouts.

    Raises:
        CheckpointError: It names all tensors that are missing, unexpected, or have the wrong shape or dtype.
    """
    needed = to_foreign(expected, config, tensor_map, family)  # meta tensors with the required names and shapes
    misshapen = [
        f"{name} is {tuple(theirs[name].shape)}, should be {tuple(meta.shape)}"
        for name, meta in needed.items()
        if name in theirs and theirs[name].shape != meta.shape
    ]
    mistyped = [f"{name} holds {t.dtype}" for name, t in theirs.items() if name in needed and not t.is_floating_point()]
    by_name = {"missing": sorted(set(needed) - set(theirs)), "unexpected": sorted(set(theirs) - set(needed))}
    problems = [f"{kind}: {join_names(names)}" for kind, names in by_name.items() if names]
    problems += [f"wrong shape: {join_names(misshapen)}"] if misshapen else []
    problems += [f"not floating point: {join_names(mistyped)}"] if mistyped else []
    if problems:
        raise CheckpointError(f"The tensors do not fit this {family} model. " + "; ".join(problems) + ".")
    state = {}
    for ours in expected:
        rule, suffix, indices = find_rule(tensor_map, ours) or (Rule(""), "", [])
        tensors = [theirs[name] for name in rule.names(suffix, indices)]
        state[ours] = rule.join(suffix, tensors, config).contiguous()
    return state


def in_file(place: str, error: PatchwordError) -> CheckpointError:
    """Turn an error about the content of a file into a CheckpointError that names the file; a specific code is kept."""
    code = error.code if error.code != type(error).code else None
    if isinstance(error, UnknownArchitectureError):
        return UnknownArchitectureError(f"{place}: {error}", missing=error.missing)
    return CheckpointError(f"{place}: {error}", code=code)


def join_names(names: Sequence[str], limit: int = 12) -> str:
    """Join the first `limit` names, and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(n if len(n) <= 200 else n[:197] + "..." for n in names[:limit]) + more
