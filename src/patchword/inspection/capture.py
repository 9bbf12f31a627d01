"""Activations and attention maps of a forward pass: the one mechanism, forward hooks, that all of inspection uses.

A fused attention kernel has no softmax to hook. So every attention of a model is a module of its own, whose hook gets
the very queries, keys and bias that the kernel gets, in any precision and on any fast path (models/cpu.py). Maps are
computed from these, for the layers asked for: nobody pays for what nobody looks at.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import ViT
from ..models.attention import attention_weights
from ..models.layers import layer_indices
from ..models.pooling import AttentionPool

MAX_MAP_BYTES = 2**28  # for the maps of a chunk, and for the copies that computing with them takes
MAP_COPIES = 4

# A forward hook as torch has it: module, positional inputs, output; a result other than None replaces the output.
Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]
# Called with the layer (an attention pool is the one behind the last), q, k, v and the bias of its attention; a result
# other than None replaces what the kernel computed.
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor | None]


def features(model: ViT, images: Tensor, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Every intermediate output by the name of the module that made it.

    "patch_embed", "positions" (all tokens, as the first block gets them), "blocks.0.attention", "blocks.0.mlp",
    "blocks.0", ..., "norm", "pool", "head".

    Args:
        images: normalized, (B, C, H, W).
        layers: the blocks to keep, all by default; negative numbers count from the end.
    """
    chosen = layer_indices(len(model.blocks), layers)
    names = ["stem", "patch_embed", "positions", "norm", "pool", "pre_logits", "head", "head_distilled"]
    names += [f"blocks.{i}{part}" for i in chosen for part in ("", ".attention", ".mlp")]
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        found[name] = output

    present = {name for name, _ in model.named_modules()}
    with forward_hooks(model, {name: partial(keep, name) for name in names if name in present}):
        model(images)
    return found


def attention_maps(model: ViT, images: Tensor, layers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """The attention maps (B, H, N, N) of the chosen layers, rows of which sum to one: `{11: maps, ...}`.

    Args:
        images: normalized, (B, C, H, W).
        layers: all by default; negative numbers count from the end.
    """
    chosen = layer_indices(len(model.blocks), layers)
    found: dict[int, Tensor] = {}

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        if layer in chosen:
            found[layer] = attention_weights(q, k, bias)

    with observe_attention(model, keep):
        model.forward_features(images)
    return {layer: found[layer] for layer in chosen}


def forward_with_maps(model: ViT, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and all maps (B, H, N, N) as part of the computation, so that gradients reach them.

    The last map is (B, H, 1, N') over the patches where the model pools by attention.
    """
    maps: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        maps.append(attention_weights(q, k, bias))
        return maps[-1] @ v

    with observe_attention(model, attend):
        logits = model(images)
    return logits, maps


@torch.inference_mode()
def reduce_maps(model: ViT, images: Tensor, reduce: Callable[[int, slice, slice, Tensor], None]) -> None:
    """One pass; `reduce(layer, images, heads, weights)` gets every map of the blocks once, in chunks of memory."""

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        for rows, heads in map_chunks(len(q), q.shape[1], q.shape[2]):
            reduce(layer, rows, heads, attention_weights(q[rows, heads], k[rows, heads], select_bias(bias, heads)))

    with observe_attention(model, observe):
        model.forward_features(images)


def select_bias(bias: Tensor | None, heads: slice) -> Tensor | None:
    """What of an additive bias, (N, N) or (H, N, N), belongs to these heads."""
    return bias[heads] if bias is not None and bias.ndim == 3 and len(bias) > 1 else bias


def map_chunks(images: int, heads: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Images and heads whose maps fit into `MAP_BYTES` together; one map of one head at least."""
    room = max(1, MAX_MAP_BYTES // (MAP_COPIES * 4 * tokens**2))
    head_count = min(heads, room)
    image_count = max(1, min(images, room // head_count))
    for image in range(0, images, image_count):
        for head in range(0, heads, head_count):
            yield slice(image, image + image_count), slice(head, head + head_count)


@contextmanager
def observe_attention(model: ViT, observe: Observer) -> Iterator[None]:
    """`observe` is called at every attention of the passes inside, in order."""

    def hook(layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        q, k, v, *bias = inputs
        return observe(layer, q, k, v, bias[0] if bias else None)

    names = [f"blocks.{i}.attention.attend" for i in range(len(model.blocks))]
    names += ["pool.attend"] if isinstance(model.pool, AttentionPool) else []
    with forward_hooks(model, {name: partial(hook, layer) for layer, name in enumerate(names)}):
        yield


@contextmanager
def forward_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Forward hooks on modules by name, for passes of the calling thread: others may use the model meanwhile."""
    owner = threading.get_ident()

    def for_owner(hook: Hook, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return hook(module, inputs, output) if threading.get_ident() == owner else None

    handles = [model.get_submodule(n).register_forward_hook(partial(for_owner, hook)) for n, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
