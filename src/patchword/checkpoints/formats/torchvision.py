"""torchvision's vit_b_16 ... vit_h_14 state dicts (.pth)."""

import re
from typing import Any, ClassVar

from ...config import ViTConfig
from ..family import (
    Family,
    Fields,
    Metadata,
    Source,
    Tensors,
    assumed_heads,
    count_blocks,
    get_shape,
    infer_image_size,
    infer_num_heads,
)
from ..mapping import Patch, Rule, TensorMap

LAYER = "encoder.layers.encoder_layer_{}"
TENSOR_MAP: TensorMap = {
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
# The published files have the names of torchvision's first MLP.
OLD_MLP = {"linear_1": "0", "linear_2": "3"}


class Torchvision(Family):
    """torchvision.models.vision_transformer."""

    name = "torchvision"
    suffix = ".pth"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class",),
        "pos_embed": ("learned",),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "torchvision"}
    preprocess: ClassVar[Fields] = {"crop": 0.875, "interpolation": "bilinear", "statistics": "imagenet"}

    def matches(self, source: Source) -> bool:
        return "conv_proj.weight" in source.tensors and "encoder.pos_embedding" in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        old = any(".mlp.linear_1." in n for n in source.tensors)
        rename = {
            re.sub(r"\.mlp\.(linear_\d)\.", lambda m: f".mlp.{OLD_MLP.get(m[1], m[1])}.", n): n for n in source.tensors
        }
        return {new: source.tensors[n] for new, n in rename.items()}, {"old_mlp": True} if old else {}

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        if not quirks.get("old_mlp"):
            return tensors
        back = {new: old for old, new in OLD_MLP.items()}
        return {re.sub(r"\.mlp\.([03])\.", lambda m: f".mlp.{back[m[1]]}.", n): t for n, t in tensors.items()}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        width, channels, ph, pw = get_shape(tensors, "conv_proj.weight", 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields["depth"] = count_blocks(tensors, "encoder.layers.encoder_layer_", ".")
        if fields["depth"]:
            fields["mlp_dim"] = get_shape(tensors, LAYER.format(0) + ".mlp.0.weight", 2)[0]
        for ours, theirs in {"num_classes": "heads.head.weight", "pre_logits": "heads.pre_logits.weight"}.items():
            fields[ours] = get_shape(tensors, theirs, 2)[0] if theirs in tensors else {"num_classes": 0}.get(ours)
        fields["num_heads"] = infer_num_heads(width, overrides, source.path.name)
        count = get_shape(tensors, "encoder.pos_embedding", 3)[1]
        fields["image_size"] = infer_image_size(count - 1, (ph, pw), overrides)
        return Metadata(fields, assumed=assumed_heads(fields["embed_dim"]))

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP
