"""The spellings of tensors in timm's classes Eva, Beit and NaFlexVit, changed to those of VisionTransformer and back.

Each spelling is independent of the others. `unify` returns those that a file has, and `restore` writes them again.
"""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from ...config import ViTConfig
from ...errors import CheckpointError
from ..mapping import add_key_bias
from .transformers_beit import join_tables, split_tables

Tensors = dict[str, Tensor]

TABLE = "relative_position_bias_table"
SHARED_TABLE = f"rel_pos_bias.{TABLE}"
FREQUENCIES = "rope.freqs"  # (2, depth, H, d/2)
BUFFERS = ("relative_position_index", "k_bias", "attn_mask")  # that old versions of timm stored


def unify(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return tensors with the names of VisionTransformer, and the spellings that were changed."""
    tensors = {n: t for n, t in tensors.items() if n.rpartition(".")[2] not in BUFFERS}
    spellings = []
    for name, (present, unify_one, _) in SPELLINGS.items():
        if any(re.search(present, n) for n in tensors):
            tensors = unify_one(tensors)
            spellings.append(name)
    return tensors, spellings


def restore(tensors: Tensors, spellings: list[str], config: ViTConfig) -> Tensors:
    """The inverse of `unify`."""
    for name in reversed([name for name in SPELLINGS if name in spellings]):
        tensors = SPELLINGS[name][2](tensors, config)
    return tensors


def unify_naflex(tensors: Tensors) -> Tensors:
    """NaFlexVit embeds flattened patches, with channels last, and has a grid of positions."""
    tensors = {n.removeprefix("embeds."): t for n, t in tensors.items()}
    weight, position = tensors.pop("proj.weight"), tensors.get("pos_embed")
    side = math.isqrt(weight.shape[-1] // 3)
    if weight.ndim != 2 or side * side * 3 != weight.shape[-1]:
        raise CheckpointError(f"embeds.proj.weight has shape {tuple(weight.shape)}: its patches are not square RGB.")
    tensors["patch_embed.proj.weight"] = weight.view(len(weight), side, side, 3).permute(0, 3, 1, 2)
    if "proj.bias" in tensors:
        tensors["patch_embed.proj.bias"] = tensors.pop("proj.bias")
    if position is not None and position.ndim == 4:
        tensors["pos_embed"] = position.flatten(1, 2)
    return tensors


def restore_naflex(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_naflex`."""
    tensors = dict(tensors)
    tensors["proj.weight"] = tensors.pop("patch_embed.proj.weight").permute(0, 2, 3, 1).flatten(1)
    if "patch_embed.proj.bias" in tensors:
        tensors["proj.bias"] = tensors.pop("patch_embed.proj.bias")
    tensors["pos_embed"] = tensors["pos_embed"].reshape(1, *config.grid, -1)
    embeds = ("proj.", "pos_embed", "reg_token", "cls_token")
    return {f"embeds.{n}" if n.startswith(embeds) else n: t for n, t in tensors.items()}


def unify_gamma(tensors: Tensors) -> Tensors:
    """LayerScale is gamma_1 and gamma_2."""
    return {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", n): t for n, t in tensors.items()}


def restore_gamma(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_gamma`."""
    return {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", n): t for n, t in tensors.items()}


def unify_bias(tensors: Tensors) -> Tensors:
    """Queries and values have a bias, next to a fused weight."""
    result = {n: t for n, t in tensors.items() if not n.endswith((".q_bias", ".v_bias"))}
    for name, queries in tensors.items():
        if name.endswith(".q_bias"):
            values = tensors.get(name.replace(".q_bias", ".v_bias"))
            if values is None:
                raise CheckpointError(f"The tensor {name.replace('q_bias', 'v_bias')} is missing.")
            result[name.replace(".q_bias", ".qkv.bias")] = torch.cat([queries, torch.zeros_like(queries), values])
    return result


def restore_bias(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_bias`."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".attn.qkv.bias"):
            queries, _, values = tensor.chunk(3)
            base = name.removesuffix("qkv.bias")
            result |= {f"{base}q_bias": queries, f"{base}v_bias": values}
        else:
            result[name] = tensor
    return result


def unify_qkv(tensors: Tensors) -> Tensors:
    """Queries, keys and values have layers of their own; keys perhaps without a bias."""
    return pack(
        add_key_bias(tensors, ".q_proj.bias", ".k_proj.bias"),
        (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj."),
        ".attn.qkv.",
    )


def restore_qkv(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_qkv`."""
    tensors = unpack(tensors, (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj."), ".attn.qkv.")
    return {n: t for n, t in tensors.items() if config.key_bias or not n.endswith(".k_proj.bias")}


def unify_mlp(tensors: Tensors) -> Tensors:
    """Gate and value of the MLP have layers of their own."""
    return pack(tensors, (".fc1_g.", ".fc1_x."), ".fc1.")


def restore_mlp(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_mlp`."""
    return unpack(tensors, (".mlp.fc1_g.", ".mlp.fc1_x."), ".mlp.fc1.", start="blocks.")


def pack(tensors: Tensors, parts: tuple[str, ...], whole: str) -> Tensors:
    """Concatenate the tensors whose names differ in `parts`, under the name with `whole`."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        part = next((part for part in parts if part in name), None)
        if part is None:
            result[name] = tensor
        elif part == parts[0]:
            names = [name.replace(part, other) for other in parts]
            if missing := [n for n in names if n not in tensors]:
                raise CheckpointError(f"The tensor {missing[0]} is missing.")
            result[name.replace(part, whole)] = torch.cat([tensors[n] for n in names])
    return result


def unpack(tensors: Tensors, parts: tuple[str, ...], whole: str, start: str = "") -> Tensors:
    """The inverse of `pack`, for names that begin with `start`."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if whole in name and name.startswith(start):
            chunks = tensor.chunk(len(parts))
            result |= {name.replace(whole, part): chunk for part, chunk in zip(parts, chunks, strict=True)}
        else:
            result[name] = tensor
    return result


def unify_shared_table(tensors: Tensors) -> Tensors:
    """One table of relative positions is shared by all blocks."""
    shared = tensors[SHARED_TABLE]
    blocks = {n.split(".")[1] for n in tensors if n.startswith("blocks.")}
    rest = {n: t for n, t in tensors.items() if n != SHARED_TABLE}
    return rest | {f"blocks.{i}.attn.{TABLE}": shared for i in blocks}


def restore_shared_table(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_shared_table`, unless training has made the tables of the blocks differ."""
    names = [f"blocks.{i}.attn.{TABLE}" for i in range(config.depth)]
    if not all(torch.equal(tensors[name], tensors[names[0]]) for name in names):
        return tensors
    return {**{n: t for n, t in tensors.items() if n not in names}, SHARED_TABLE: tensors[names[0]]}


def unify_frequencies(tensors: Tensors) -> Tensors:
    """The learned frequencies of rotary positions of all blocks are one tensor."""
    frequencies = tensors[FREQUENCIES]
    rest = {n: t for n, t in tensors.items() if n != FREQUENCIES}
    if frequencies.ndim != 4:
        raise CheckpointError(f"{FREQUENCIES} has shape {tuple(frequencies.shape)}; it should have 4 dimensions.")
    return rest | {f"blocks.{i}.attn.{FREQUENCIES}": block for i, block in enumerate(frequencies.unbind(1))}


def restore_frequencies(tensors: Tensors, config: ViTConfig) -> Tensors:
    """The inverse of `unify_frequencies`."""
    names = [f"blocks.{i}.attn.{FREQUENCIES}" for i in range(config.depth)]
    stacked = torch.stack([tensors[name] for name in names], dim=1)
    return {**{n: t for n, t in tensors.items() if n not in names}, FREQUENCIES: stacked}


Unify = Callable[[Tensors], Tensors]
Restore = Callable[[Tensors, ViTConfig], Tensors]
# name: pattern of a tensor that shows it, and the functions both ways
SPELLINGS: dict[str, tuple[str, Unify, Restore]] = {
    "naflex": (r"^embeds\.proj\.weight$", unify_naflex, restore_naflex),
    "gamma": (r"^blocks\.\d+\.gamma_1$", unify_gamma, restore_gamma),
    "bias": (r"^blocks\.\d+\.attn\.q_bias$", unify_bias, restore_bias),
    "qkv": (r"^blocks\.\d+\.attn\.q_proj\.weight$", unify_qkv, restore_qkv),
    "mlp": (r"^blocks\.\d+\.mlp\.fc1_g\.weight$", unify_mlp, restore_mlp),
    "shared table": (rf"^{re.escape(SHARED_TABLE)}$", unify_shared_table, restore_shared_table),
    "table": (rf"\.{TABLE}$", lambda t: split_tables(t, TABLE), lambda t, _: join_tables(t, TABLE)),
    "frequencies": (rf"^{re.escape(FREQUENCIES)}$", unify_frequencies, restore_frequencies),
}
