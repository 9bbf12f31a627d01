"""How one of our modules is named and laid out elsewhere: the vocabulary in which each family's table is written.

A table maps our module (or bare parameter) to a rule. "{}" stands for an index, such as that of a block. A rule turns
our tensor into theirs (`split`) and theirs into ours (`join`); both only move numbers, so a round trip is bit-equal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ViTConfig
from ..errors import CheckpointError, ConversionError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """The same tensors under another name; `parts` are slices of our first axis stored apart."""

    name: str
    parts: tuple[str, ...] = ("",)
    first: int = 0  # what their first index is

    def names(self, suffix: str, indices: Sequence[int]) -> list[str]:
        base = self.name.format(*(i + self.first for i in indices))
        return [base + part + self.suffix(suffix) for part in self.parts]

    def suffix(self, suffix: str) -> str:
        return f".{suffix}" if suffix else ""

    def split(self, suffix: str, tensor: Tensor, config: ViTConfig) -> list[Tensor]:
        return [self.export(suffix, t, config) for t in tensor.chunk(len(self.parts))]

    def join(self, suffix: str, tensors: list[Tensor], config: ViTConfig) -> Tensor:
        return torch.cat([self.restore(suffix, t, config) for t in tensors])

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor


@dataclass(frozen=True)
class Patch(Rule):
    """Our patch matrix (D, C*P*P) as a convolution kernel (D, C, P, P)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor if suffix == "bias" else tensor.reshape(len(tensor), config.map_channels, *config.patch_size)

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor if suffix == "bias" else tensor.flatten(1)


@dataclass(frozen=True)
class Flax(Rule):
    """Flax separates names by slashes and calls a weight "kernel" ("scale" in norms)."""

    weight: str = "kernel"

    def suffix(self, suffix: str) -> str:
        return {"weight": f"/{self.weight}", "": ""}.get(suffix, f"/{suffix}")


@dataclass(frozen=True)
class FlaxDense(Flax):
    """(in, out) instead of (out, in)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.T if suffix == "weight" else tensor

    restore = export


@dataclass(frozen=True)
class FlaxConv(Flax):
    """Kernels (height, width, in, out) instead of (out, in, height, width)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.permute(2, 3, 1, 0) if suffix == "weight" else tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.permute(3, 2, 0, 1) if suffix == "weight" else tensor


@dataclass(frozen=True)
class FlaxPatch(FlaxConv):
    """Our patch matrix (D, C*P*P) as such a kernel."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        if suffix == "weight":
            tensor = tensor.reshape(len(tensor), config.map_channels, *config.patch_size)
        return super().export(suffix, tensor, config)

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        tensor = super().restore(suffix, tensor, config)
        return tensor.flatten(1) if suffix == "weight" else tensor


@dataclass(frozen=True)
class FlaxHeads(Flax):
    """A projection into heads: kernel (D, H, d) and bias (H, d)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        tensor = tensor.reshape(config.num_heads, -1, *tensor.shape[1:])  # (H, d[, D])
        return tensor.permute(2, 0, 1) if suffix == "weight" else tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        tensor = tensor.permute(1, 2, 0) if suffix == "weight" else tensor
        return tensor.flatten(0, 1)


@dataclass(frozen=True)
class FlaxMerge(Flax):
    """The projection out of the heads: kernel (H, d, D)."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.T.reshape(config.num_heads, -1, len(tensor)) if suffix == "weight" else tensor

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return tensor.flatten(0, 1).T if suffix == "weight" else tensor


Table = dict[str, Rule]


def find(table: Table, ours: str) -> tuple[Rule, str, list[int]] | None:
    """The rule for one of our tensors, with "weight", "bias" or nothing, and the indices in the name."""
    indices = [int(i) for i in re.findall(r"(?<=\.)\d+(?=\.|$)", ours)]
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", ours)
    if pattern in table:
        return table[pattern], "", indices
    module, _, suffix = pattern.rpartition(".")
    return (table[module], suffix, indices) if module in table else None


def to_theirs(state: Tensors, config: ViTConfig, table: Table, family: str) -> Tensors:
    """Our tensors under their names, in their layout."""
    theirs: Tensors = {}
    homeless = []
    for ours, tensor in state.items():
        found = find(table, ours)
        if found is None:
            homeless.append(ours)
            continue
        rule, suffix, indices = found
        theirs.update(zip(rule.names(suffix, indices), rule.split(suffix, tensor, config), strict=True))
    if homeless:
        raise ConversionError(f"The {family} format has no place for {listed(homeless)}.")
    return theirs


def to_ours(theirs: Tensors, config: ViTConfig, table: Table, family: str, expected: Tensors) -> Tensors:
    """Their tensors under our names, in our layout; all that is missing, left over or misshapen is named."""
    needed = to_theirs(expected, config, table, family)  # meta tensors: the names and shapes the file must have
    wrong = [
        f"{name} is {tuple(theirs[name].shape)}, should be {tuple(meta.shape)}"
        for name, meta in needed.items()
        if name in theirs and theirs[name].shape != meta.shape
    ]
    typed = [f"{name} holds {t.dtype}" for name, t in theirs.items() if name in needed and not t.is_floating_point()]
    problems = {"missing": sorted(set(needed) - set(theirs)), "unexpected": sorted(set(theirs) - set(needed))}
    found = [f"{kind}: {listed(names)}" for kind, names in problems.items() if names]
    found += [f"wrong shape: {listed(wrong)}"] if wrong else []
    found += [f"not real numbers: {listed(typed)}"] if typed else []
    if found:
        raise CheckpointError(f"The tensors do not make this {family} model. " + "; ".join(found) + ".")
    state = {}
    for ours in expected:
        rule, suffix, indices = find(table, ours) or (Rule(""), "", [])
        tensors = [theirs[name] for name in rule.names(suffix, indices)]
        state[ours] = rule.join(suffix, tensors, config).contiguous()
    return state


def listed(names: Sequence[str], most: int = 12) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(n if len(n) <= 200 else n[:197] + "..." for n in names[:most]) + more
