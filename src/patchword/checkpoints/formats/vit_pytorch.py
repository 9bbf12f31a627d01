"""lucidrains/vit-pytorch's ViT and SimpleViT state dicts (read only: its files say too little to be worth writing)."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...config import ViTConfig
from ...errors import CheckpointError, Note
from ..family import Described, Family, Fields, Source, Tensors, count_blocks, image_size_for, shape_of
from ..mapping import Rule, Table

ATTENTION, MLP = "transformer.layers.{}.0", "transformer.layers.{}.1.net"
PATCH = "to_patch_embedding"


@dataclass(frozen=True)
class PixelFirst(Rule):
    """Patches flattened pixel by pixel, channels last; ours are channel first. Acts on the last axis."""

    def export(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return self.turn(tensor, (config.in_channels, *config.patch_size), (1, 2, 0))

    def restore(self, suffix: str, tensor: Tensor, config: ViTConfig) -> Tensor:
        return self.turn(tensor, (*config.patch_size, config.in_channels), (2, 0, 1))

    def turn(self, tensor: Tensor, parts: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        lead = tensor.shape[:-1]
        axes = [*range(len(lead)), *(len(lead) + i for i in order)]
        return tensor.reshape(*lead, *parts).permute(axes).reshape(*lead, -1)


TABLE: Table = {
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
SIMPLE: Table = {
    **TABLE,
    "blocks.{}.attention.out": Rule(ATTENTION + ".to_out"),
    "blocks.{}.mlp.fc2": Rule(MLP + ".3"),
    "head": Rule("linear_head"),
}


class ViTPytorch(Family):
    name = "vit_pytorch"
    writes = False
    defaults: ClassVar[Fields] = {"norm_eps": 1e-5, "patch_norm": True, "qkv_bias": False}
    preprocess: ClassVar[Fields] = {}

    def recognises(self, source: Source) -> bool:
        return f"{PATCH}.2.weight" in source.tensors and "transformer.norm.weight" in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        tensors = {n: t for n, t in source.tensors.items() if t.numel()}  # an empty cls_token is none
        for name in ("cls_token", "pos_embedding"):
            if name in tensors and 2 <= tensors[name].ndim <= 3:
                tensors[name] = tensors[name].reshape(1, -1, tensors[name].shape[-1])
        return tensors, {}

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        width, patch_dim = shape_of(tensors, f"{PATCH}.2.weight", 2)
        channels = int(given.get("in_channels", 3))
        side = math.isqrt(patch_dim // channels) if channels > 0 else 0
        if side * side * channels != patch_dim:
            raise CheckpointError(
                f"A patch of {patch_dim} numbers is not square with {channels} channels; give in_channels."
            )
        simple = "linear_head.weight" in tensors or "transformer.layers.0.0.to_out.weight" in tensors
        fields: Fields = {**self.defaults, "embed_dim": width, "patch_size": side, "in_channels": channels}
        fields |= {"class_token": "cls_token" in tensors, "out_bias": not simple}
        fields["pooling"] = "class" if fields["class_token"] else "average"
        fields["depth"] = count_blocks(tensors, "transformer.layers.", ".")
        fields |= heads_of(tensors, given)
        fields["mlp_dim"] = shape_of(tensors, MLP.format(0) + ".1.weight", 2)[0]
        head = next((n for n in ("mlp_head.weight", "linear_head.weight") if n in tensors), None)
        fields["num_classes"] = shape_of(tensors, head, 2)[0] if head else 0
        if simple:
            fields |= {"pos_embed": "sincos", "image_size": given.get("image_size", 224)}
        else:
            count = shape_of(tensors, "pos_embedding", 3)[1] - fields["class_token"]
            fields["image_size"] = image_size_for(count, (side, side), given)
        text = "vit-pytorch files do not state how images were normalized: 0.5/0.5 is assumed."
        return Described(fields, notes=[Note(text, "preprocess_assumed")])

    def table(self, config: ViTConfig) -> Table:
        return TABLE if config.out_bias else SIMPLE


def heads_of(tensors: Tensors, given: Fields) -> Fields:
    """vit-pytorch's heads are 64 wide unless its user chose otherwise, which the file does not say."""
    inner = shape_of(tensors, ATTENTION.format(0) + ".to_qkv.weight", 2)[0] // 3
    heads = given.get("num_heads") or (inner // given["head_dim"] if given.get("head_dim") else inner // 64)
    if not heads or inner % int(heads):
        raise CheckpointError(
            f"The file does not say how {inner} attention channels are shared among heads. "
            "Give num_heads, for example num_heads=8 in Python or --num-heads 8 on the command line."
        )
    return {"num_heads": int(heads), "head_dim": inner // int(heads)}
