"""Adapts weights to another image size, number of channels or number of classes; nothing else may differ.

The head is replaced only if the number of classes changes.
"""

from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ResNetConfig, ViTConfig
from ..errors import ConfigError
from .pos_embed import resample_grid, resample_line

State = dict[str, Tensor]

# Fields that do not affect any tensor.
WEIGHTLESS_FIELDS = {
    "dropout",
    "attention_dropout",
    "drop_path",
    "patch_dropout",
    "grad_checkpointing",
    "pos_embed_resample",
    "local_attention_init",
}
ADAPTABLE_FIELDS = {"image_size", "in_channels", "num_classes", "pre_logits", "projection_dim"}
# Weights of the layer that reads the image, by kind of stem.
INPUT_WEIGHTS = {"linear": "patch_embed.proj.weight", "resnet": "stem.conv.weight", "conv": "stem.0.weight"}


def adapt_state(state: State, old: ModelConfig, new: ModelConfig) -> State:
    """Adapts the state dict of a model `old` to a model `new`."""
    check_adaptable(old, new)
    state = dict(state)
    if new.num_classes != old.num_classes or pre_logits_width(new) != pre_logits_width(old):
        state = replace_head(state, new)
    if new.in_channels != old.in_channels:
        adapt_input(state, old, new)
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and new.grid != old.grid:
        state = resample_positions(state, old, new)
    if isinstance(new, ResNetConfig) and new.spatial == "axial" and new.image_size != old.image_size:
        state = resample_axial(state, new)
    return state


def adapt_config(config: Any, **changes: Any) -> Any:
    """Changes fields of a config; a new number of classes also removes the pre-training head, as in the paper.

    CLIP's projection is removed with it, as its space is made for texts.
    """
    if changes.get("num_classes", config.num_classes) != config.num_classes and isinstance(config, ViTConfig):
        changes = {"pre_logits": None, "projection_dim": None, **changes}
    return config.replace(**changes)


def check_adaptable(old: ModelConfig, new: ModelConfig) -> None:
    """Raises a ConfigError if other fields differ than those that can be adapted."""
    before, after = old.to_json(), new.to_json()
    changed = [k for k in before if before[k] != after.get(k) and k not in WEIGHTLESS_FIELDS | ADAPTABLE_FIELDS]
    for name in ("pre_logits", "projection_dim"):  # they can only be removed; the first only together with the head
        kept_head = before["num_classes"] == after["num_classes"] and (name == "pre_logits" or before["num_classes"])
        if before.get(name) != after.get(name) and (after[name] is not None or kept_head):
            changed.append(name)
    if type(old) is not type(new) or changed:
        raise ConfigError(
            f"Weights cannot be adapted to another {', '.join(changed) or 'architecture'}; "
            f"only to another {', '.join(sorted(ADAPTABLE_FIELDS))}."
        )


def pre_logits_width(config: ModelConfig) -> int | None:
    """Returns the width of the layer between pooling and head, if there is one."""
    return config.pre_logits or config.projection_dim if isinstance(config, ViTConfig) else None


def replace_head(state: State, new: ModelConfig) -> State:
    """Replaces the head by zeros for the new number of classes, and removes its hidden layer if `new` has none."""
    hidden = pre_logits_width(new)
    removed = {"head", "head_distilled"} | (set() if hidden else {"pre_logits"})
    kept = {k: v for k, v in state.items() if k.split(".")[0] not in removed}
    if not new.num_classes:
        return kept
    like = next(tensor for tensor in state.values() if tensor.is_floating_point())
    heads = ["head", "head_distilled"] if isinstance(new, ViTConfig) and new.distillation else ["head"]
    for head in heads:
        kept[f"{head}.weight"] = like.new_zeros(new.num_classes, hidden or new.pooled_dim)
        kept[f"{head}.bias"] = like.new_zeros(new.num_classes)
    return kept


def adapt_input(state: State, old: ModelConfig, new: ModelConfig) -> None:
    """Adapts the first layer to the new number of channels, in place."""
    name = INPUT_WEIGHTS[old.stem] if isinstance(old, ViTConfig) else "conv.weight"
    weight = state[name]
    flat = weight.reshape(weight.shape[0], old.in_channels, -1)
    adapted = adapt_channels(flat, new.in_channels)
    state[name] = adapted.flatten(1) if weight.ndim == 2 else adapted.reshape(len(weight), -1, *weight.shape[2:])
    for norm in ("patch_embed.norm_in.weight", "patch_embed.norm_in.bias"):
        if norm in state:
            raise ConfigError(
                "model.in_channels cannot be adapted in a model with patch_norm, which normalizes over channels."
            )


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Converts (D, N, ...) to (D, M, ...) with the same sum over channels, so that gray images give the same output.

    More channels: the weights of each old channel are split among new ones, cyclically. Fewer: they are added up.
    """
    old = weight.shape[1]
    source = torch.arange(max(old, channels))
    mix = torch.zeros(channels, old, dtype=weight.dtype)
    mix[source % channels, source % old] = 1
    return torch.einsum("mn,dn...->dm...", mix / mix.sum(dim=0, keepdim=True), weight)


def resample_positions(state: State, old: ViTConfig, new: ViTConfig) -> State:
    """Resamples learned position embeddings to another grid; the model computes fixed ones itself."""
    mode, k = new.pos_embed_resample, old.num_positioned
    state = dict(state)
    if old.absolute_pos_embed == "learned":
        table = state["positions.table"][0]
        patches = resample_grid(table[k:], old.grid, new.grid, mode)
        state["positions.table"] = torch.cat([table[:k], patches])[None]
    elif old.absolute_pos_embed == "learned_2d":
        state["positions.rows"] = resample_line(state["positions.rows"], new.grid[0], mode)
        state["positions.columns"] = resample_line(state["positions.columns"], new.grid[1], mode)
    if old.has_relative:
        before, after = ((2 * h - 1, 2 * w - 1) for h, w in (old.grid, new.grid))
        for layer in range(old.depth):
            name = f"blocks.{layer}.attention.bias.relative"  # (H, 2h-1, 2w-1): offsets lie on a grid, too
            table = state[name].flatten(1).T
            state[name] = resample_grid(table, before, after, mode).T.reshape(-1, *after)
    return state


def resample_axial(state: State, new: ResNetConfig) -> State:
    """Resamples the relative positions of axial attention to another image size, linearly; offset 0 stays in place."""
    from . import tensor_shapes

    lengths = {name: len(t) for name, t in tensor_shapes(new).items() if ".relative_" in name}
    return state | {name: resample_offsets(state[name], length) for name, length in lengths.items()}


def resample_offsets(table: Tensor, length: int) -> Tensor:
    """Resamples a table of offsets, of odd length: (n, D) -> (length, D)."""
    if length == 1:  # with aligned corners, a single sample would be the first offset
        return table[len(table) // 2, None]
    return resample_line(table, length, "google")
