"""Google's `vit_jax` .npz files: AugReg, SAM, the paper's own, hybrids, with and without `pre_logits`."""

import re
from typing import Any, ClassVar

from ...config import MAX_STAGES, ViTConfig
from ..family import Family, Fields, Metadata, Source, Tensors, count_blocks, get_shape, infer_image_size
from ..mapping import Flax, FlaxConv, FlaxDense, FlaxHeads, FlaxMerge, FlaxPatch, Rule, TensorMap

BLOCK = "Transformer/encoderblock_{}"
ATTENTION = BLOCK + "/MultiHeadDotProductAttention_1"
# The current vit_jax numbers the modules of a block by type; the published files number them in sequence.
LINEN = {"MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1", "LayerNorm_1": "LayerNorm_2"}
LINEN |= {"MlpBlock_0": "MlpBlock_3"}
UNIT = "block{}/unit{}"
EMBEDDING = "embedding/kernel"


def norm(name: str, first: int = 0) -> Flax:
    """Make the rule for a normalization layer."""
    return Flax(name, weight="scale", first=first)


TENSOR_MAP: TensorMap = {
    "class_token": Rule("cls"),
    "positions.table": Rule("Transformer/posembed_input/pos_embedding"),
    "patch_embed.proj": FlaxPatch("embedding"),
    "blocks.{}.norm1": norm(BLOCK + "/LayerNorm_0"),
    "blocks.{}.attention.qkv": FlaxHeads(ATTENTION, ("/query", "/key", "/value")),
    "blocks.{}.attention.out": FlaxMerge(ATTENTION + "/out"),
    "blocks.{}.norm2": norm(BLOCK + "/LayerNorm_2"),
    "blocks.{}.mlp.fc1": FlaxDense(BLOCK + "/MlpBlock_3/Dense_0"),
    "blocks.{}.mlp.fc2": FlaxDense(BLOCK + "/MlpBlock_3/Dense_1"),
    "norm": norm("Transformer/encoder_norm"),
    "pre_logits": FlaxDense("pre_logits"),
    "head": FlaxDense("head"),
    "stem.conv": FlaxConv("conv_root"),
    "stem.norm": norm("gn_root"),
    **{f"stem.stages.{{}}.{{}}.conv{i}": FlaxConv(f"{UNIT}/conv{i}", first=1) for i in (1, 2, 3)},
    **{f"stem.stages.{{}}.{{}}.norm{i}": norm(f"{UNIT}/gn{i}", first=1) for i in (1, 2, 3)},
    "stem.stages.{}.{}.shortcut.conv": FlaxConv(f"{UNIT}/conv_proj", first=1),
    "stem.stages.{}.{}.shortcut.norm": norm(f"{UNIT}/gn_proj", first=1),
}


class Google(Family):
    """google-research/vision_transformer (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

    name = "google"
    suffix = ".npz"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {"pos_embed": ("learned",), "pooling": ("class", "average")}
    defaults: ClassVar[Fields] = {"activation": "gelu_tanh", "weight_standardization": "google"}
    # vit_jax evaluates on the whole image, resized to a square.
    preprocess: ClassVar[Fields] = {"resize": "squash", "interpolation": "bilinear"}

    def matches(self, source: Source) -> bool:
        return "Transformer/posembed_input/pos_embedding" in source.tensors and EMBEDDING in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        tensors, quirks = dict(source.tensors), {}
        if any("/MlpBlock_0/" in name for name in tensors):
            tensors = {rename(name, LINEN): t for name, t in tensors.items()}
            quirks["linen"] = True
        group_norms = [n for n in tensors if is_group_norm(n) and tensors[n].ndim == 4]
        for name in group_norms:  # older versions of Flax store (1, 1, 1, C)
            tensors[name] = tensors[name].flatten()
        if group_norms:
            quirks["group_norm_4d"] = True
        return tensors, quirks

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        if quirks.get("group_norm_4d"):
            tensors = {n: t.reshape(1, 1, 1, -1) if is_group_norm(n) else t for n, t in tensors.items()}
        if quirks.get("linen"):
            tensors = {rename(n, {new: old for old, new in LINEN.items()}): t for n, t in tensors.items()}
        return tensors

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        fields = {
            **self.defaults,
            **infer_flax_fields(tensors, ATTENTION, BLOCK + "/MlpBlock_3"),
            **infer_stem(tensors),
        }
        fields |= {"class_token": "cls" in tensors, "pooling": "class" if "cls" in tensors else "average"}
        count = get_shape(tensors, TENSOR_MAP["positions.table"].name, 3)[1]
        fields["pos_embed_prefix"] = int(fields["class_token"])
        stem_stride = 4 * 2 ** max(0, len(fields["stem_layers"]) - 1) if "stem" in fields else 1
        stride = (fields["patch_size"][0] * stem_stride, fields["patch_size"][1] * stem_stride)
        fields["image_size"] = infer_image_size(count - fields["pos_embed_prefix"], stride, overrides)
        return Metadata(fields)

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP


def rename(name: str, mapping: dict[str, str]) -> str:
    """Rename a module of an encoder block; names outside blocks are unchanged."""
    if not name.startswith("Transformer/encoderblock_"):
        return name
    return "/".join(mapping.get(part, part) for part in name.split("/"))


def is_group_norm(name: str) -> bool:
    """Whether a tensor belongs to a GroupNorm of the ResNet stem."""
    return re.search(r"(^|/)gn(_root|_proj|\d)/", name) is not None


def infer_flax_fields(tensors: Tensors, attention: str, mlp: str) -> Fields:
    """Infer the sizes that tensor shapes show in both of Google's formats."""
    ph, pw, channels, width = get_shape(tensors, EMBEDDING, 4)
    fields: dict[str, Any] = {"patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
    fields["depth"] = count_blocks(tensors, BLOCK.split("{}")[0], "/")
    if fields["depth"]:
        _, fields["num_heads"], fields["head_dim"] = get_shape(tensors, attention.format(0) + "/query/kernel", 3)
        fields["mlp_dim"] = get_shape(tensors, mlp.format(0) + "/Dense_0/kernel", 2)[1]
    fields["num_classes"] = get_shape(tensors, "head/kernel", 2)[1] if "head/kernel" in tensors else 0
    fields["pre_logits"] = get_shape(tensors, "pre_logits/kernel", 2)[1] if "pre_logits/kernel" in tensors else None
    return fields


def infer_stem(tensors: Tensors) -> Fields:
    """Infer the ResNet stem of a hybrid; empty for other models."""
    if "conv_root/kernel" not in tensors:
        return {}
    _, _, channels, width = get_shape(tensors, "conv_root/kernel", 4)
    stages = count_blocks({n.replace("block", "block/"): t for n, t in tensors.items()}, "block/", "/") - 1
    stages = max(0, min(stages, MAX_STAGES + 1))  # more are rejected by the config
    units = tuple(count_blocks(tensors, f"block{s + 1}/unit", "/") - 1 for s in range(stages))
    return {"stem": "resnet", "stem_layers": units, "stem_width": width, "in_channels": channels}
