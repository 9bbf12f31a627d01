"""The fields of a config that the tensors of a timm state dict show; DeiT, MAE and DINO use the same names."""

import math

from ...config import MAX_STAGES
from ..family import Fields, Tensors, count_blocks, get_shape, infer_image_size, infer_prefix_positions
from .timm_names import TABLE

BACKBONE = "patch_embed.backbone"
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")


def infer_fields(tensors: Tensors) -> Fields:
    """Infer fields from the names and shapes of tensors."""
    width, channels, ph, pw = get_shape(tensors, "patch_embed.proj.weight", 4)
    fields: Fields = {"patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
    fields["depth"] = count_blocks(tensors, "blocks.", ".")
    fields["class_token"] = "cls_token" in tensors
    fields["distillation"] = "dist_token" in tensors
    registers = next((n for n in REGISTERS if n in tensors), None)
    fields["num_registers"] = get_shape(tensors, registers, 3)[1] if registers else 0
    fields["num_classes"] = get_shape(tensors, "head.weight", 2)[0] if "head.weight" in tensors else 0
    fields["norm_embed"] = "patch_embed.norm.weight" in tensors
    fields["norm_pre"] = "norm_pre.weight" in tensors
    fields["patch_bias"] = not fields["norm_pre"]
    if fields["depth"]:
        fields |= infer_block_fields(tensors)
    return {**fields, **infer_pool_fields(tensors), **infer_stem(tensors)}


def infer_pool_fields(tensors: Tensors) -> Fields:
    """Infer pooling, as far as tensors show it."""
    fields: Fields = {"pooling": "class" if "cls_token" in tensors else "average"}
    if "fc_norm.weight" in tensors:
        fields |= {"pooling": "average", "norm_after_pool": True}
    if "attn_pool.latent" in tensors:
        fields["pooling"] = "attention"
        hidden, mlp_dim = (get_shape(tensors, f"{at}.fc2.weight", 2)[1] for at in ("attn_pool.mlp", "blocks.0.mlp"))
        fields |= {"pool_mlp_dim": hidden} if hidden != mlp_dim else {}
    return fields


def infer_block_fields(tensors: Tensors) -> Fields:
    """Infer the fields that the first block shows."""
    fields: Fields = {"qk_norm": "blocks.0.attn.q_norm.weight" in tensors}
    fields["qkv_bias"] = "blocks.0.attn.qkv.bias" in tensors
    fields["out_bias"] = "blocks.0.attn.proj.bias" in tensors
    fields["attention_norm"] = "blocks.0.attn.norm.weight" in tensors
    fields["mlp_norm"] = "blocks.0.mlp.norm.weight" in tensors
    if "blocks.0.norm1.weight" in tensors and "blocks.0.norm1.bias" not in tensors:
        fields["norm_layer"] = "rms_norm"
    if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & set(tensors):
        fields["layer_scale"] = 1.0
    if f"blocks.0.attn.{TABLE}.patches" in tensors:
        fields |= {"pos_embed": "relative", "relative_prefix": True}
    first, last = ("fc1", "fc2") if "blocks.0.mlp.fc1.weight" in tensors else ("w12", "w3")
    hidden = get_shape(tensors, f"blocks.0.mlp.{first}.weight", 2)[0]
    fields["mlp_dim"] = get_shape(tensors, f"blocks.0.mlp.{last}.weight", 2)[1]
    fields["mlp_bias"] = f"blocks.0.mlp.{last}.bias" in tensors
    if hidden == 2 * fields["mlp_dim"]:
        fields["activation"] = "swiglu"
    return fields


def infer_stem(tensors: Tensors) -> Fields:
    """Infer the ResNet stem of a hybrid; empty for other models."""
    root = next((n for n in (f"{BACKBONE}.stem.conv.weight", f"{BACKBONE}.conv.weight") if n in tensors), None)
    if root is None:
        return {}
    width, channels, _, _ = get_shape(tensors, root, 4)
    stages = min(count_blocks(tensors, f"{BACKBONE}.stages.", "."), MAX_STAGES + 1)  # more are rejected by the config
    units = tuple(count_blocks(tensors, f"{BACKBONE}.stages.{s}.blocks.", ".") for s in range(stages))
    return {"stem": "resnet", "stem_layers": units, "stem_width": width, "in_channels": channels}


def infer_positions(tensors: Tensors, fields: Fields, overrides: Fields, no_embed_class: bool | None) -> Fields:
    """Infer the image size and the number of prefix tokens with a position from the number of positions."""
    count = get_shape(tensors, "pos_embed", 3)[1]
    num_prefix = fields["class_token"] + fields["distillation"] + fields["num_registers"]
    stem = 4 * 2 ** max(0, len(fields["stem_layers"]) - 1) if "stem" in fields else 1
    stride = (fields["patch_size"][0] * stem, fields["patch_size"][1] * stem)
    size = overrides.get("image_size")
    patches = (size[0] // stride[0]) * (size[1] // stride[1]) if size else 0
    if no_embed_class is not None:
        prefix = 0 if no_embed_class else num_prefix
    elif 0 <= count - patches <= num_prefix and math.isqrt(patches) ** 2 != patches:
        prefix = count - patches  # a non-square model whose size the caller gave
    else:
        prefix = infer_prefix_positions(count, num_prefix)
    return {"pos_embed_prefix": prefix, "image_size": infer_image_size(count - prefix, stride, overrides)}
