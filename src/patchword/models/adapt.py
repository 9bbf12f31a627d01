"""Weights of one model made to fit a changed one: another image size, channel count or number of classes.

Nothing else may differ. The head is replaced only because the caller asked for another number of classes.
"""

from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..errors import ConfigError
from .pos_embed import resample_grid, resample_line

State = dict[str, Tensor]

# A change of these leaves every tensor as it is.
WEIGHTLESS_FIELDS = {"dropout", "drop_path", "patch_dropout", "grad_checkpointing", "pos_embed_resample", "local_attention_init"}
ADAPTABLE_FIELDS = {"image_size", "in_channels", "num_classes", "pre_logits"}
# The first layer that sees the image's channels, by kind of model.
INPUT_WEIGHTS = {"linear": "patch_embed.proj.weight", "resnet": "stem.conv.weight", "conv": "stem.0.weight"}


def adapt_state(state: State, old: ModelConfig, new: ModelConfig) -> State:
    """`state` of a model `old`, for a model `new` that differs in image size, channels or classes."""
    check_adaptable(old, new)
    state = dict(state)
    if new.num_classes != old.num_classes:
        state = replace_head(state, new)
    if new.in_channels != old.in_channels:
        adapt_input(state, old, new)
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and new.grid != old.grid:
        state = resample_positions(state, old, new)
    return state


def adapt_config(config: Any, **changes: Any) -> Any:
    """`config` with changes. A new number of classes removes the whole pre-training head, as the paper does."""
    if changes.get("num_classes", config.num_classes) != config.num_classes and isinstance(config, ViTConfig):
        changes = {"pre_logits": None, **changes}
    return config.replace(**changes)


def check_adaptable(old: ModelConfig, new: ModelConfig) -> None:
    before, after = old.to_json(), new.to_json()
    changed = [k for k in before if before[k] != after.get(k) and k not in WEIGHTLESS_FIELDS | ADAPTABLE_FIELDS]
    if before.get("pre_logits") != after.get("pre_logits") and (
        after["pre_logits"] is not None or before["num_classes"] == after["num_classes"]
    ):
        changed.append("pre_logits")  # it goes when the head is replaced; it cannot come, or go by itself
    if type(old) is not type(new) or changed:
        raise ConfigError(
            f"Weights cannot be adapted across a change of {', '.join(changed) or 'architecture'}; "
            f"only of {', '.join(sorted(ADAPTABLE_FIELDS))}."
        )


def replace_head(state: State, new: ModelConfig) -> State:
    """A head of zeros for the new number of classes; the old one goes, with its hidden layer where `new` has none."""
    hidden = new.pre_logits if isinstance(new, ViTConfig) else None
    gone = {"head", "head_distilled"} | (set() if hidden else {"pre_logits"})
    kept = {k: v for k, v in state.items() if k.split(".")[0] not in gone}
    if not new.num_classes:
        return kept
    like = next(tensor for tensor in state.values() if tensor.is_floating_point())
    heads = ["head", "head_distilled"] if isinstance(new, ViTConfig) and new.distillation else ["head"]
    for head in heads:
        kept[f"{head}.weight"] = like.new_zeros(new.num_classes, hidden or new.pooled_dim)
        kept[f"{head}.bias"] = like.new_zeros(new.num_classes)
    return kept


def adapt_input(state: State, old: ModelConfig, new: ModelConfig) -> None:
    name = INPUT_WEIGHTS[old.stem] if isinstance(old, ViTConfig) else "conv.weight"
    weight = state[name]
    flat = weight.reshape(weight.shape[0], old.in_channels, -1)
    adapted = adapt_channels(flat, new.in_channels)
    state[name] = adapted.flatten(1) if weight.ndim == 2 else adapted.reshape(len(weight), -1, *weight.shape[2:])
    for norm in ("patch_embed.norm_in.weight", "patch_embed.norm_in.bias"):
        if norm in state:
            raise ConfigError("patch_norm normalises over the channels, so their number cannot be adapted.")


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """(D, N, ...) to (D, M, ...) with the same sum over channels, so a grey picture gives the same response.

    More channels: each new one shares the weights of an old one, in turn. Fewer: the old ones are added up, in turn.
    """
    old = weight.shape[1]
    source = torch.arange(max(old, channels))
    mix = torch.zeros(channels, old, dtype=weight.dtype)
    mix[source % channels, source % old] = 1
    return torch.einsum("mn,dn...->dm...", mix / mix.sum(dim=0, keepdim=True), weight)


def resample_positions(state: State, old: ViTConfig, new: ViTConfig) -> State:
    """Learned positions of any kind for another grid; fixed ones are computed anew by the model."""
    mode, k = new.pos_embed_resample, old.num_positioned
    state = dict(state)
    if old.pos_embed == "learned":
        table = state["positions.table"][0]
        patches = resample_grid(table[k:], old.grid, new.grid, mode)
        state["positions.table"] = torch.cat([table[:k], patches])[None]
    elif old.pos_embed == "learned_2d":
        state["positions.rows"] = resample_line(state["positions.rows"], new.grid[0], mode)
        state["positions.columns"] = resample_line(state["positions.columns"], new.grid[1], mode)
    elif old.pos_embed == "relative":
        before, after = ((2 * h - 1, 2 * w - 1) for h, w in (old.grid, new.grid))
        for layer in range(old.depth):
            name = f"blocks.{layer}.attention.bias.relative"  # (H, 2h-1, 2w-1): offsets lie on a grid, too
            table = state[name].flatten(1).T
            state[name] = resample_grid(table, before, after, mode).T.reshape(-1, *after)
    return state
