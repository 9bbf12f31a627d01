"""Captures activations and attention maps of a forward pass with forward hooks; all of inspection is built on it.

A fused attention kernel has no softmax to hook. So the kernel call is a module of its own, whose hook gets the same
queries, keys and bias as the kernel, in any precision and on any fast path (models/cpu.py). Maps are computed from
these, and only for the layers requested.
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
from ..models.resnet import ResNetBase
from ..models.spatial import NonLocal

MAX_MAP_BYTES = 2**28  # for the maps of a chunk and their copies
MAP_COPIES = 4  # in memory at once, while something is computed from maps

# A forward hook of torch: module, positional inputs, output; a result other than None replaces the output.
Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]
# Called with the layer (an attention pool comes after the last block), q, k, v and the bias of its attention; a result
# other than None replaces the output of the kernel.
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor | None]


def features(model: ViT, images: Tensor, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Runs the model on images and returns its intermediate outputs.

    Args:
        model: The model, usually in evaluation mode.
        images: Normalized images, (B, C, H, W).
        layers: The blocks to include, all by default; negative numbers count from the end.

    Returns:
        Outputs by the name of their module: "stem", "patch_embed", "positions" (all tokens), "norm_pre" (the input of
            the first block), "blocks.0", "blocks.0.attention", "blocks.0.mlp", ..., "norm", "pool", "head". Outputs of
            blocks are tokens (B, N, D), prefix tokens first. Gradients are recorded unless you disable them.

    Raises:
        ConfigError: The model has no such layer.

    Examples:
        ```python
        import torch
        import patchword as pw

        model = pw.load_model("patchword:cifar10")
        with torch.inference_mode():
            outputs = pw.features(model, torch.zeros(1, 3, 32, 32), layers=[-1])
        print(outputs["blocks.5"].shape)  # torch.Size([1, 64, 160])
        ```
    """
    chosen = layer_indices(len(model.blocks), layers)
    names = ["stem", "patch_embed", "positions", "norm_pre", "norm", "pool", "pre_logits", "head", "head_distilled"]
    names += [f"blocks.{i}{part}" for i in chosen for part in ("", ".attention", ".mlp")]
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        outputs[name] = output

    present = {name for name, _ in model.named_modules()}
    with forward_hooks(model, {name: partial(keep, name) for name in names if name in present}):
        model(images)
    return outputs


def attention_maps(model: ViT, images: Tensor, layers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """Runs the model on images and returns its attention maps.

    Args:
        model: The model, usually in evaluation mode.
        images: Normalized images, (B, C, H, W).
        layers: The layers to return, all by default; negative numbers count from the end.

    Returns:
        Maps (B, H, N, N) by layer, counted from 0, for H heads and N tokens, prefix tokens first. Row i is the
            attention of token i and sums to 1.

    Raises:
        ConfigError: The model has no such layer.

    Examples:
        ```python
        import torch
        import patchword as pw

        model = pw.load_model("patchword:cifar10")
        maps = pw.attention_maps(model, torch.zeros(1, 3, 32, 32), layers=[-1])
        print(maps[5].shape)  # torch.Size([1, 8, 64, 64])
        ```
    """
    chosen = layer_indices(len(model.blocks), layers)
    maps: dict[int, Tensor] = {}

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        if layer in chosen:
            maps[layer] = attention_weights(q, k, bias)

    with observe_attention(model, keep):
        model.forward_features(images)
    return {layer: maps[layer] for layer in chosen}


def non_local_weights(model: ResNetBase, images: Tensor) -> Tensor:
    """Runs a ResNet on images and returns the weights of its Non-local block: (B, h, w, h, w).

    Entry [b, y, x] is what position (y, x) attends to; in the forms "gaussian" and "embedded" it sums to 1.
    """
    captured: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        captured.append(output)

    names = [name for name, module in model.named_modules() if isinstance(module, NonLocal)]
    with forward_hooks(model, {f"{name}{part}": keep for name in names for part in (".weights", "")}):
        model.feature_map(images)
    weights, feature_map = captured
    size = feature_map.shape[2:]
    return weights.unflatten(2, size).unflatten(1, size)


def forward_with_maps(model: ViT, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns logits, and all maps (B, H, N, N) as nodes of the autograd graph, so that they get gradients.

    If the model has an attention pool, its map over the tokens that it reads is the last: (B, H, 1, n).
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
    """Calls `reduce(layer, images, heads, weights)` with every map of a pass once, in chunks of bounded memory."""

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        for rows, heads in map_chunks(len(q), q.shape[1], q.shape[2]):
            reduce(layer, rows, heads, attention_weights(q[rows, heads], k[rows, heads], select_bias(bias, heads)))

    with observe_attention(model, observe):
        model.forward_features(images)


def select_bias(bias: Tensor | None, heads: slice) -> Tensor | None:
    """Returns the part of an additive bias, (N, N) or (H, N, N), that belongs to these heads."""
    return bias[heads] if bias is not None and bias.ndim == 3 and len(bias) > 1 else bias


def map_chunks(images: int, heads: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of images and heads whose maps fit into `MAX_MAP_BYTES`, or are a single map."""
    max_maps = max(1, MAX_MAP_BYTES // (MAP_COPIES * 4 * tokens**2))
    head_count = min(heads, max_maps)
    image_count = max(1, min(images, max_maps // head_count))
    for image in range(0, images, image_count):
        for head in range(0, heads, head_count):
            yield slice(image, image + image_count), slice(head, head + head_count)


@contextmanager
def observe_attention(model: ViT, observe: Observer) -> Iterator[None]:
    """Calls `observe` at every attention of the forward passes inside the context, in order."""

    def hook(layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        q, k, v, *bias = inputs
        return observe(layer, q, k, v, bias[0] if bias else None)

    names = [f"blocks.{i}.attention.attend" for i in range(len(model.blocks))]
    names += ["pool.attend"] if isinstance(model.pool, AttentionPool) else []
    with forward_hooks(model, {name: partial(hook, layer) for layer, name in enumerate(names)}):
        yield


@contextmanager
def forward_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Registers forward hooks on modules by name, for passes of the calling thread only."""
    owner = threading.get_ident()

    def for_owner(hook: Hook, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return hook(module, inputs, output) if threading.get_ident() == owner else None

    handles = [model.get_submodule(n).register_forward_hook(partial(for_owner, hook)) for n, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
