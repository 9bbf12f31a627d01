"""big_vision's .npz files: class token, average or MAP pooling, learned or sin-cos positions, two-tower files."""

import re
from typing import ClassVar

import torch
from torch import Tensor

from ...config import MAX_BLOCKS, ViTConfig
from ...errors import CheckpointError, Note
from ..family import Family, Fields, Metadata, Source, Tensors, get_shape, infer_image_size
from ..mapping import FlaxDense, FlaxHeads, FlaxMerge, Rule, TensorMap
from .google import BLOCK, EMBEDDING, infer_flax_fields, norm
from .google import TENSOR_MAP as GOOGLE_MAP

ATTENTION = BLOCK + "/MultiHeadDotProductAttention_0"
SCANNED = "Transformer/encoderblock/"  # all blocks stacked on a leading axis

TENSOR_MAP: TensorMap = {
    **{name: GOOGLE_MAP[name] for name in ("class_token", "patch_embed.proj", "norm", "pre_logits", "head")},
    "positions.table": Rule("pos_embedding"),
    "blocks.{}.norm1": norm(BLOCK + "/LayerNorm_0"),
    "blocks.{}.attention.qkv": FlaxHeads(ATTENTION, ("/query", "/key", "/value")),
    "blocks.{}.attention.out": FlaxMerge(ATTENTION + "/out"),
    "blocks.{}.norm2": norm(BLOCK + "/LayerNorm_1"),
    "blocks.{}.mlp.fc1": FlaxDense(BLOCK + "/MlpBlock_0/Dense_0"),
    "blocks.{}.mlp.fc2": FlaxDense(BLOCK + "/MlpBlock_0/Dense_1"),
    "pool.probe": Rule("MAPHead_0/probe"),
    "pool.q": FlaxHeads("MAPHead_0/MultiHeadDotProductAttention_0/query"),
    "pool.kv": FlaxHeads("MAPHead_0/MultiHeadDotProductAttention_0", ("/key", "/value")),
    "pool.out": FlaxMerge("MAPHead_0/MultiHeadDotProductAttention_0/out"),
    "pool.norm": norm("MAPHead_0/LayerNorm_0"),
    "pool.fc1": FlaxDense("MAPHead_0/MlpBlock_0/Dense_0"),
    "pool.fc2": FlaxDense("MAPHead_0/MlpBlock_0/Dense_1"),
}


class BigVision(Family):
    """google-research/big_vision."""

    name = "big_vision"
    suffix = ".npz"
    defaults: ClassVar[Fields] = {"activation": "gelu_tanh", "pos_embed_prefix": 0}
    preprocess: ClassVar[Fields] = {"crop": 0.875, "interpolation": "bilinear"}
    passthrough: ClassVar[dict[str, str]] = {"t": "params/t", "b": "params/b"}  # of a two-tower file

    def matches(self, source: Source) -> bool:
        return (
            any(n.endswith("/encoder_norm/scale") for n in source.tensors) and find_prefix(source.tensors) is not None
        )

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = find_prefix(source.tensors) or ""
        text_tower = [n for n in source.tensors if n.startswith("params/txt/")]
        tensors = {n.removeprefix(prefix): t for n, t in source.tensors.items() if n not in text_tower}
        quirks: Fields = {"prefix": prefix, "scan": any(n.startswith(SCANNED) for n in tensors)}
        if quirks["scan"]:
            tensors = unstack(tensors)
        return tensors, quirks

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        tensors = stack(tensors) if quirks.get("scan") else tensors
        prefix = str(quirks.get("prefix", "params/"))
        return {n if n in self.passthrough.values() else prefix + n: t for n, t in tensors.items()}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        fields = {**self.defaults, **infer_flax_fields(tensors, ATTENTION, BLOCK + "/MlpBlock_0")}
        pooling = "attention" if "MAPHead_0/probe" in tensors else "class" if "cls" in tensors else "average"
        fields |= {"class_token": "cls" in tensors, "pooling": pooling}
        notes = []
        if "pos_embedding" in tensors:
            count = get_shape(tensors, "pos_embedding", 3)[1]
            fields["image_size"] = infer_image_size(count, fields["patch_size"], overrides)
        else:  # sin-cos positions are computed, so any image size is possible
            fields["pos_embed"] = "sincos"
            fields["image_size"] = overrides.get("image_size", 224)
            if "image_size" not in overrides:
                text = "sin-cos positions: the file does not store its image size; 224 is assumed."
                notes.append(Note(text, "image_size_assumed"))
        if find_prefix(source.tensors) == "params/img/":
            notes.append(Note("two-tower file: only the image tower is read.", "text_tower_skipped"))
        return Metadata(fields, notes=notes)

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        return 0

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP


def find_prefix(tensors: Tensors) -> str | None:
    """Return the prefix of all names: "params/", "params/img/", "opt/target/" or nothing."""
    prefixes = [n.removesuffix(EMBEDDING) for n in tensors if n.endswith(EMBEDDING) and "/txt/" not in n]
    return min(prefixes, key=len, default=None)


def unstack(tensors: Tensors) -> Tensors:
    """Split tensors in which `nn.scan` has stacked all blocks into one tensor per block."""
    result = {n: t for n, t in tensors.items() if not n.startswith(SCANNED)}
    for name, stacked in tensors.items():
        if name.startswith(SCANNED):
            if stacked.ndim == 0 or len(stacked) > MAX_BLOCKS:
                shape = tuple(stacked.shape)
                raise CheckpointError(
                    f"The tensor {name} should have all blocks on its first axis, but its shape is {shape}."
                )
            rest = name.removeprefix(SCANNED)
            result |= {f"{BLOCK.format(i)}/{rest}": t for i, t in enumerate(stacked)}
    return result


def stack(tensors: Tensors) -> Tensors:
    """Inverse of `unstack`."""
    result: Tensors = {}
    blocks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"Transformer/encoderblock_(\d+)/(.+)", name):
            blocks.setdefault(SCANNED + match[2], {})[int(match[1])] = tensor
        else:
            result[name] = tensor
    return result | {name: torch.stack([layers[i] for i in sorted(layers)]) for name, layers in blocks.items()}
