"""big_vision's .npz files: class token, average or MAP pooling, learned or sin-cos positions, two-tower files."""

import re
from typing import ClassVar

import torch
from torch import Tensor

from ...config import MAX_BLOCKS, ViTConfig
from ...errors import CheckpointError, Note
from ..family import Described, Family, Fields, Source, Tensors, image_size_for, shape_of
from ..mapping import FlaxDense, FlaxHeads, FlaxMerge, Rule, Table
from .google import BLOCK, EMBEDDING, TABLE, flax_sizes, norm

ATTENTION = BLOCK + "/MultiHeadDotProductAttention_0"
SCANNED = "Transformer/encoderblock/"  # all blocks stacked on a leading axis

OWN: Table = {
    **{name: TABLE[name] for name in ("class_token", "patch_embed.proj", "norm", "pre_logits", "head")},
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
    name = "big_vision"
    suffix = ".npz"
    defaults: ClassVar[Fields] = {"activation": "gelu_tanh", "pos_embed_prefix": 0}
    preprocess: ClassVar[Fields] = {"crop": 0.875, "interpolation": "bilinear"}
    unused: ClassVar[dict[str, str]] = {"t": "params/t", "b": "params/b"}  # of a two-tower file

    def recognises(self, source: Source) -> bool:
        return any(n.endswith("/encoder_norm/scale") for n in source.tensors) and prefix_of(source.tensors) is not None

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = prefix_of(source.tensors) or ""
        towers = [n for n in source.tensors if n.startswith("params/txt/")]
        tensors = {n.removeprefix(prefix): t for n, t in source.tensors.items() if n not in towers}
        quirks: Fields = {"prefix": prefix, "scan": any(n.startswith(SCANNED) for n in tensors)}
        if quirks["scan"]:
            tensors = unstack(tensors)
        return tensors, quirks

    def restore(self, tensors: Tensors, quirks: Fields) -> Tensors:
        tensors = stack(tensors) if quirks.get("scan") else tensors
        prefix = str(quirks.get("prefix", "params/"))
        return {n if n in self.unused.values() else prefix + n: t for n, t in tensors.items()}

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        fields = {**self.defaults, **flax_sizes(tensors, ATTENTION, BLOCK + "/MlpBlock_0")}
        pooling = "attention" if "MAPHead_0/probe" in tensors else "class" if "cls" in tensors else "average"
        fields |= {"class_token": "cls" in tensors, "pooling": pooling}
        notes = []
        if "pos_embedding" in tensors:
            count = shape_of(tensors, "pos_embedding", 3)[1]
            fields["image_size"] = image_size_for(count, fields["patch_size"], given)
        else:  # sin-cos positions are computed, so the file fits any image size
            fields["pos_embed"] = "sincos"
            fields["image_size"] = given.get("image_size", 224)
            if "image_size" not in given:
                text = "sin-cos positions: the file does not state its image size; 224 is assumed."
                notes.append(Note(text, "image_size_assumed"))
        if prefix_of(source.tensors) == "params/img/":
            notes.append(Note("two-tower file: only the image tower is read.", "text_tower_skipped"))
        return Described(fields, notes=notes)

    def positioned(self, config: ViTConfig) -> int:
        return 0

    def table(self, config: ViTConfig) -> Table:
        return OWN


def prefix_of(tensors: Tensors) -> str | None:
    """What stands before every name: "params/", "params/img/", "opt/target/" or nothing."""
    found = [n.removesuffix(EMBEDDING) for n in tensors if n.endswith(EMBEDDING) and "/txt/" not in n]
    return min(found, key=len, default=None)


def unstack(tensors: Tensors) -> Tensors:
    result = {n: t for n, t in tensors.items() if not n.startswith(SCANNED)}
    for name, stacked in tensors.items():
        if name.startswith(SCANNED):
            if stacked.ndim == 0 or len(stacked) > MAX_BLOCKS:
                shape = tuple(stacked.shape)
                raise CheckpointError(f"The tensor {name} should hold all blocks on its first axis, but has {shape}.")
            rest = name.removeprefix(SCANNED)
            result |= {f"{BLOCK.format(i)}/{rest}": t for i, t in enumerate(stacked)}
    return result


def stack(tensors: Tensors) -> Tensors:
    result: Tensors = {}
    blocks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"Transformer/encoderblock_(\d+)/(.+)", name):
            blocks.setdefault(SCANNED + match[2], {})[int(match[1])] = tensor
        else:
            result[name] = tensor
    return result | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in blocks.items()}
