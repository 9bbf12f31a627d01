"""torchvision's vit_b_16 ... vit_h_14 state dicts (.pth)."""

import re
from typing import Any, ClassVar

from ...config import ViTConfig
from ..family import Described, Family, Fields, Source, Tensors, count_blocks, guess_heads, image_size_for, shape_of
from ..mapping import Patch, Rule, Table

LAYER = "encoder.layers.encoder_layer_{}"
TABLE: Table = {
    "class_token": Rule("class_token"),
    "positions.table": Rule("encoder.pos_embedding"),
    "patch_embed.proj": Patch("conv_proj"),
    "blocks.{}.norm1": Rule(LAYER + ".ln_1"),
    "blocks.{}.attention.qkv.weight": Rule(LAYER + ".self_attention.in_proj_weight"),
    "blocks.{}.attention.qkv.bias": Rule(LAYER + ".self_attention.in_proj_bias"),
    "blocks.{}.attention.out": Rule(LAYER + ".self_attention.out_proj"),
    "blocks.{}.norm2": Rule(LAYER + ".ln_2"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.0"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.3"),
    "norm": Rule("encoder.ln"),
    "pre_logits": Rule("heads.pre_logits"),
    "head": Rule("heads.head"),
}
# The published files still carry the names of torchvision's first MLP.
OLD_MLP = {"linear_1": "0", "linear_2": "3"}


class Torchvision(Family):
    name = "torchvision"
    suffix = ".pth"
    needs: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class",),
        "pos_embed": ("learned",),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "torchvision"}
    preprocess: ClassVar[Fields] = {"crop": 0.875, "interpolation": "bilinear", "statistics": "imagenet"}

    def recognises(self, source: Source) -> bool:
        return "conv_proj.weight" in source.tensors and "encoder.pos_embedding" in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        old = any(".mlp.linear_1." in n for n in source.tensors)
        rename = {
            re.sub(r"\.mlp\.(linear_\d)\.", lambda m: f".mlp.{OLD_MLP.get(m[1], m[1])}.", n): n for n in source.tensors
        }
        return {new: source.tensors[n] for new, n in rename.items()}, {"old_mlp": True} if old else {}

    def restore(self, tensors: Tensors, quirks: Fields) -> Tensors:
        if not quirks.get("old_mlp"):
            return tensors
        back = {new: old for old, new in OLD_MLP.items()}
        return {re.sub(r"\.mlp\.([03])\.", lambda m: f".mlp.{back[m[1]]}.", n): t for n, t in tensors.items()}

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        width, channels, ph, pw = shape_of(tensors, "conv_proj.weight", 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields["depth"] = count_blocks(tensors, "encoder.layers.encoder_layer_", ".")
        if fields["depth"]:
            fields["mlp_dim"] = shape_of(tensors, LAYER.format(0) + ".mlp.0.weight", 2)[0]
        for ours, theirs in {"num_classes": "heads.head.weight", "pre_logits": "heads.pre_logits.weight"}.items():
            fields[ours] = shape_of(tensors, theirs, 2)[0] if theirs in tensors else {"num_classes": 0}.get(ours)
        fields["num_heads"] = guess_heads(width, given, source.path.name)
        count = shape_of(tensors, "encoder.pos_embedding", 3)[1]
        fields["image_size"] = image_size_for(count - 1, (ph, pw), given)
        return Described(fields)

    def table(self, config: ViTConfig) -> Table:
        return TABLE
