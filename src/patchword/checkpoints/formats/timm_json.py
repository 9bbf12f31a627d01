"""timm's config.json: the architecture, the arguments of its class and the preprocessing, both ways."""

from typing import Any

from ...config import ViTConfig
from ...errors import CheckpointError, ConversionError
from ..family import Fields, size_to_json, translate_value

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_erf": "gelu", "quick_gelu": "quick_gelu"}
CROP_MODES = {"center": "cover", "squash": "squash"}
POOLS = {"token": "class", "avg": "average", "map": "attention"}
HYBRIDS = {(): "vit_tiny_r_s16_p8_224", (2, 2, 2, 2): "vit_small_r26_s32_224", (3, 4, 9): "vit_base_r50_s16_224"}
HYBRIDS |= {(3, 4, 6, 3): "vit_large_r50_s32_224"}
SIZE_NAMES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
# Arguments that change what is computed without changing tensors, and that we do not read. Architectures set them.
UNREADABLE: tuple[str, ...] = ("block_fn", "attn_type", "attn_layer", "norm_layer", "num_kv_heads", "use_post_norm")
UNREADABLE += ("use_rot_pos_emb", "rope_type", "rope_grid_offset", "rope_grid_indexing", "rope_rotate_half")
UNREADABLE += ("pos_embed", "pos_embed_interp_mode", "pos_embed_ar_preserving")


def parse_model_args(config: Fields, arguments: Fields) -> Fields:
    """Return the fields of config.json that tensor shapes do not show."""
    if unreadable := [name for name in UNREADABLE if name in arguments]:
        values = ", ".join(f"{name}={arguments[name]!r}" for name in unreadable)
        raise CheckpointError(f"config.json has model_args that patchword does not read: {values}.")
    names = {"img_size": "image_size", "num_heads": "num_heads", "depth": "depth", "ref_feat_shape": "rope_reference"}
    names |= {
        "attn_pool_num_heads": "pool_heads",
        "pool_include_prefix": "pool_prefix",
        "rope_temperature": "rope_base",
    }
    given = {ours: arguments[theirs] for theirs, ours in names.items() if arguments.get(theirs) is not None}
    fields = ViTConfig.cast_fields(given)
    if (act := arguments.get("act_layer")) and act != "silu":  # the tensors show SwiGLU
        fields["activation"] = translate_value(act, ACTIVATIONS, "activation")
    if pool := arguments.get("global_pool") or config.get("global_pool"):
        fields["pooling"] = translate_value(pool, POOLS, "global_pool")
    return fields


def parse_preprocess(config: Any) -> Fields:
    """Convert timm's pretrained_cfg. Its input size is ignored: it may be that of the entry point."""
    if not isinstance(config, dict):
        return {}
    names = {"mean": "mean", "std": "std", "crop_pct": "crop", "interpolation": "interpolation"}
    fields = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    if config.get("crop_mode"):
        fields["resize"] = translate_value(config["crop_mode"], CROP_MODES, "crop_mode")
    return fields


def timm_config(config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields) -> Fields:
    """Return the config.json that timm reads."""
    pool = {v: k for k, v in POOLS.items()}[config.pooling]
    outputs = config.projection_dim or config.num_classes
    size = [own + rest for own, rest in zip(preprocess["size"], preprocess["trim"], strict=True)]
    changes: Fields = {"img_size": size, "num_classes": outputs, "global_pool": pool}
    changes["in_chans"] = config.in_channels
    if "architecture" in quirks and "model_args" in quirks:
        architecture, arguments = quirks["architecture"], {**quirks["model_args"], **changes}
    else:
        architecture, arguments = choose_architecture(config)
        arguments = {**size_arguments(config), **arguments, **changes}
    result: Fields = {"architecture": architecture, "num_classes": outputs}
    result |= {"num_features": config.embed_dim, "global_pool": pool, "model_args": arguments}
    result["pretrained_cfg"] = {
        "input_size": [config.in_channels, *size],
        "interpolation": preprocess["interpolation"],
        "crop_pct": preprocess["crop"],
        "crop_mode": "squash" if preprocess["resize"] == "squash" else "center",
        "mean": list(preprocess["mean"]),
        "std": list(preprocess["std"]),
        "num_classes": outputs,
    }
    return {**result, "label_names": list(labels)} if labels else result


def size_arguments(config: ViTConfig) -> Fields:
    """Return the arguments that all of timm's classes have."""
    arguments: Fields = {"patch_size": size_to_json(config.patch_size), "embed_dim": config.embed_dim}
    arguments |= {"depth": config.depth, "num_heads": config.num_heads}
    return {**arguments, "mlp_ratio": config.mlp_dim / config.embed_dim, "init_values": config.layer_scale}


def choose_architecture(config: ViTConfig) -> tuple[str, Fields]:
    """Return an architecture with the parts of a model, and the arguments in which the model differs from it."""
    if config.has_relative:
        return "beit_base_patch16_224", {"use_abs_pos_emb": config.absolute_pos_embed == "learned"}
    if config.has_rope or not config.key_bias:
        return choose_eva(config)
    return choose_vit(config)


def choose_vit(config: ViTConfig) -> tuple[str, Fields]:
    """Choose an architecture of timm's class VisionTransformer."""
    name = f"vit_{SIZE_NAMES.get(config.embed_dim, 'base')}_patch16_224"
    if config.stem == "resnet":
        name = HYBRIDS.get(config.stem_layers, name)
    elif config.distillation:
        name = "deit_base_distilled_patch16_224"
    elif config.res_post_norm:
        name = "vit_base_patch16_rpn_224"
    elif config.norm_pre:
        name = f"vit_base_patch16_clip_{'quickgelu_' if config.activation == 'quick_gelu' else ''}224"
    elif config.norm_layer == "rms_norm":
        name = "aimv2_large_patch14_224"
    elif config.activation == "swiglu":
        name = "vit_giant_patch14_reg4_dinov2" if config.num_registers else "vit_giant_patch14_dinov2"
    elif config.pooling == "attention" and not config.class_token:
        name = "vit_base_patch16_siglip_224"
    arguments: Fields = {"class_token": config.class_token, "fc_norm": config.norm_after_pool}
    arguments |= {"reg_tokens": config.num_registers, "qkv_bias": config.qkv_bias, "qk_norm": config.qk_norm}
    arguments["no_embed_class"] = config.num_positioned == 0 and config.num_prefix > 0
    if config.attention_norm or config.mlp_norm:
        arguments |= {"scale_attn_norm": config.attention_norm, "scale_mlp_norm": config.mlp_norm}
    if config.activation in ("gelu", "gelu_tanh") and not config.norm_pre:
        arguments["act_layer"] = config.activation
    if config.activation == "swiglu" and config.norm_layer != "rms_norm":
        arguments["mlp_ratio"] = 2 * config.mlp_dim / config.embed_dim
    return name, arguments


ROPE_ARCHITECTURES = {"dinov3": "vit_small_patch16_dinov3", "pe": "vit_pe_core_base_patch16_224"}
ROPE_ARCHITECTURES |= {"axial": "vit_small_patch16_rope_224", "mixed": "vit_small_patch16_rope_mixed_224"}


def choose_eva(config: ViTConfig) -> tuple[str, Fields]:
    """Choose an architecture of timm's class Eva."""
    arguments: Fields = {"class_token": config.class_token, "num_reg_tokens": config.num_registers}
    arguments |= {"use_abs_pos_emb": config.absolute_pos_embed == "learned", "qkv_bias": config.qkv_bias}
    arguments["no_embed_class"] = config.num_positioned == 0 and config.num_prefix > 0
    arguments |= {"use_fc_norm": config.norm_after_pool}
    arguments["use_post_transformer_norm"] = config.final_norm and not config.norm_after_pool
    arguments |= {"scale_mlp": config.mlp_norm, "scale_attn_inner": config.attention_norm}
    arguments |= {"qk_norm": config.qk_norm, "swiglu_mlp": config.activation == "swiglu"}
    if not config.has_rope:
        return "eva_giant_patch14_clip_224", arguments
    if config.rope_reference:
        arguments["ref_feat_shape"] = list(config.rope_reference)
    if config.rope_base:
        arguments["rope_temperature"] = config.rope_base
    if config.rope == "eva02":
        return "eva02_base_patch16_clip_224", {**arguments, "qkv_fused": True}
    if config.rope not in ROPE_ARCHITECTURES:
        raise ConversionError(f"timm has no rotary positions of the kind rope={config.rope!r}.")
    if config.rope == "pe":
        arguments |= {"attn_pool_num_heads": config.pool_heads or config.num_heads}
        arguments["attn_pool_mlp_ratio"] = (config.pool_mlp_dim or config.mlp_dim) / config.embed_dim
    return ROPE_ARCHITECTURES[config.rope], arguments
