"""lucidrains/vit-pytorch's ViT and SimpleViT state dicts (read only: its files store too little)."""

import math
from typing import ClassVar

from ...config import ViTConfig
from ...errors import CheckpointError, Note
from ..family import (
    Family,
    Fields,
    Metadata,
    Source,
    Tensors,
    count_blocks,
    get_shape,
    infer_image_size,
    require_fields,
)
from ..mapping import PixelFirst, Rule, TensorMap

ATTENTION, MLP = "transformer.layers.{}.0", "transformer.layers.{}.1.net"
PATCH = "to_patch_embedding"

TENSOR_MAP: TensorMap = {
    "class_token": Rule("cls_token"),
    "positions.table": Rule("pos_embedding"),
    "patch_embed.norm_in": PixelFirst(f"{PATCH}.1"),
    "patch_embed.proj.weight": PixelFirst(f"{PATCH}.2.weight"),
    "patch_embed.proj.bias": Rule(f"{PATCH}.2.bias"),
    "patch_embed.norm_out": Rule(f"{PATCH}.3"),
    "blocks.{}.norm1": Rule(ATTENTION + ".norm"),
    "blocks.{}.attention.qkv": Rule(ATTENTION + ".to_qkv"),
    "blocks.{}.attention.out": Rule(ATTENTION + ".to_out.0"),
    "blocks.{}.norm2": Rule(MLP + ".0"),
    "blocks.{}.mlp.fc1": Rule(MLP + ".1"),
    "blocks.{}.mlp.fc2": Rule(MLP + ".4"),
    "norm": Rule("transformer.norm"),
    "head": Rule("mlp_head"),
}
SIMPLE: TensorMap = {
    **TENSOR_MAP,
    "blocks.{}.attention.out": Rule(ATTENTION + ".to_out"),
    "blocks.{}.mlp.fc2": Rule(MLP + ".3"),
    "head": Rule("linear_head"),
}


class ViTPytorch(Family):
    """lucidrains/vit-pytorch."""

    name = "vit_pytorch"
    writable = False
    defaults: ClassVar[Fields] = {"norm_eps": 1e-5, "patch_norm": True, "qkv_bias": False}
    preprocess: ClassVar[Fields] = {}

    def matches(self, source: Source) -> bool:
        return f"{PATCH}.2.weight" in source.tensors and "transformer.norm.weight" in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        tensors = {n: t for n, t in source.tensors.items() if t.numel()}  # without a class token, cls_token is empty
        for name in ("cls_token", "pos_embedding"):
            if name in tensors and 2 <= tensors[name].ndim <= 3:
                tensors[name] = tensors[name].reshape(1, -1, tensors[name].shape[-1])
        return tensors, {}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        width, patch_dim = get_shape(tensors, f"{PATCH}.2.weight", 2)
        channels = int(overrides.get("in_channels", 3))
        side = math.isqrt(patch_dim // channels) if channels > 0 else 0
        if side * side * channels != patch_dim:
            raise CheckpointError(
                f"A patch of {patch_dim} values is not square with {channels} channels. Give in_channels."
            )
        simple = "linear_head.weight" in tensors or "transformer.layers.0.0.to_out.weight" in tensors
        fields: Fields = {**self.defaults, "embed_dim": width, "patch_size": side, "in_channels": channels}
        fields |= {"class_token": "cls_token" in tensors, "out_bias": not simple}
        fields["pooling"] = "class" if fields["class_token"] else "average"
        fields["depth"] = count_blocks(tensors, "transformer.layers.", ".")
        fields |= infer_heads(tensors, overrides)
        fields["mlp_dim"] = get_shape(tensors, MLP.format(0) + ".1.weight", 2)[0]
        head = next((n for n in ("mlp_head.weight", "linear_head.weight") if n in tensors), None)
        fields["num_classes"] = get_shape(tensors, head, 2)[0] if head else 0
        if simple:
            fields |= {"pos_embed": "sincos", "image_size": overrides.get("image_size", 224)}
        else:
            count = get_shape(tensors, "pos_embedding", 3)[1] - fields["class_token"]
            fields["image_size"] = infer_image_size(count, (side, side), overrides)
        text = "vit-pytorch files do not store the normalization: mean 0.5 and std 0.5 are assumed."
        return Metadata(fields, notes=[Note(text, "preprocess_assumed")])

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP if config.out_bias else SIMPLE


def infer_heads(tensors: Tensors, overrides: Fields) -> Fields:
    """Return the heads that the caller gives: the file does not say how the channels of attention are split."""
    inner = get_shape(tensors, ATTENTION.format(0) + ".to_qkv.weight", 2)[0] // 3
    if head_dim := overrides.get("head_dim"):
        overrides = {"num_heads": inner // head_dim, **overrides}
    reason = f"The file does not store how {inner} attention channels are split into heads (64 wide by default)."
    require_fields(overrides, ("num_heads",), reason)
    heads = int(overrides["num_heads"])
    if not heads or inner % heads:
        raise CheckpointError(f"{inner} attention channels cannot be split into num_heads={heads} heads.")
    return {"num_heads": heads, "head_dim": inner // heads}
