"""timm's Vision Transformers: a folder with config.json, or a bare .safetensors or .pth state dict."""

import math
from typing import Any, ClassVar

from ...config import MAX_STAGES, ViTConfig
from ...errors import CheckpointError
from ..family import (
    Family,
    Fields,
    Metadata,
    Source,
    Tensors,
    count_blocks,
    get_shape,
    infer_image_size,
    infer_num_heads,
    infer_prefix_positions,
    size_to_json,
    translate_value,
)
from ..mapping import Patch, Rule, TensorMap

BACKBONE = "patch_embed.backbone"
STAGE = f"{BACKBONE}.stages.{{}}.blocks.{{}}"

TENSOR_MAP: TensorMap = {
    "class_token": Rule("cls_token"),
    "distillation_token": Rule("dist_token"),
    "registers": Rule("reg_token"),
    "positions.table": Rule("pos_embed"),
    "patch_embed.proj": Patch("patch_embed.proj"),
    "blocks.{}.norm1": Rule("blocks.{}.norm1"),
    "blocks.{}.attention.qkv": Rule("blocks.{}.attn.qkv"),
    "blocks.{}.attention.q_norm": Rule("blocks.{}.attn.q_norm"),
    "blocks.{}.attention.k_norm": Rule("blocks.{}.attn.k_norm"),
    "blocks.{}.attention.out": Rule("blocks.{}.attn.proj"),
    "blocks.{}.add1.gamma": Rule("blocks.{}.ls1.gamma"),
    "blocks.{}.norm2": Rule("blocks.{}.norm2"),
    "blocks.{}.mlp.fc1": Rule("blocks.{}.mlp.fc1"),
    "blocks.{}.mlp.fc2": Rule("blocks.{}.mlp.fc2"),
    "blocks.{}.add2.gamma": Rule("blocks.{}.ls2.gamma"),
    "norm": Rule("norm"),
    "pool.probe": Rule("attn_pool.latent"),
    **{f"pool.{part}": Rule(f"attn_pool.{part}") for part in ("q", "kv", "norm")},
    "pool.out": Rule("attn_pool.proj"),
    "pool.fc1": Rule("attn_pool.mlp.fc1"),
    "pool.fc2": Rule("attn_pool.mlp.fc2"),
    "head": Rule("head"),
    "head_distilled": Rule("head_dist"),
    "stem.conv": Rule(f"{BACKBONE}.stem.conv"),
    "stem.norm": Rule(f"{BACKBONE}.stem.norm"),
    **{f"stem.stages.{{}}.{{}}.{kind}{i}": Rule(f"{STAGE}.{kind}{i}") for kind in ("conv", "norm") for i in (1, 2, 3)},
    "stem.stages.{}.{}.shortcut.conv": Rule(f"{STAGE}.downsample.conv"),
    "stem.stages.{}.{}.shortcut.norm": Rule(f"{STAGE}.downsample.norm"),
}
ROOT_ONLY = {"stem.conv": Rule(f"{BACKBONE}.conv"), "stem.norm": Rule(f"{BACKBONE}.norm")}

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_erf": "gelu"}
POOLS = {"token": "class", "avg": "average", "map": "attention"}
SIZE_NAMES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}


class Timm(Family):
    """huggingface/pytorch-image-models."""

    name = "timm"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {"pos_embed": ("learned",), "pooling": tuple(POOLS.values())}
    defaults: ClassVar[Fields] = {"weight_standardization": "timm", "pos_embed_resample": "timm"}
    preprocess: ClassVar[Fields] = {"crop": 0.9}

    def matches(self, source: Source) -> bool:
        return "pos_embed" in source.tensors and any(n.startswith("patch_embed.") for n in source.tensors)

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        arguments = source.config.get("model_args") or {}
        if not isinstance(arguments, dict):
            raise CheckpointError("config.json has model_args that are not an object.")
        fields = {**self.defaults, **infer_fields(tensors), **parse_model_args(source.config, arguments)}
        if "num_heads" not in arguments:
            where = source.path.name
            fields["num_heads"] = infer_num_heads(fields["embed_dim"], overrides, where)
        overrides = {**overrides, **({"image_size": fields.pop("image_size")} if "image_size" in fields else {})}
        fields |= infer_positions(tensors, fields, overrides, arguments.get("no_embed_class"))
        labels = source.config.get("label_names")
        return Metadata(
            fields,
            preprocess=parse_preprocess(source.config.get("pretrained_cfg")),
            labels=tuple(map(str, labels)) if isinstance(labels, list) else None,
        )

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        """All prefix tokens have position embeddings, or none (no_embed_class)."""
        return config.num_prefix if config.num_positioned == config.num_prefix else 0

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        tensor_map = {**TENSOR_MAP, **({} if config.stem_layers else ROOT_ONLY)}
        return {**tensor_map, "norm": Rule("fc_norm")} if config.norm_after_pool else tensor_map

    def sidecars(self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> dict[str, Fields]:
        return {"config.json": timm_config(config, labels, preprocess)}


def infer_fields(tensors: Tensors) -> Fields:
    """Infer fields from the shapes of a timm state dict; DeiT and DINOv2 use the same names."""
    width, channels, ph, pw = get_shape(tensors, "patch_embed.proj.weight", 4)
    fields: Fields = {"patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
    fields["depth"] = count_blocks(tensors, "blocks.", ".")
    fields["class_token"] = "cls_token" in tensors
    fields["distillation"] = "dist_token" in tensors
    registers = next((n for n in ("reg_token", "register_tokens") if n in tensors), None)
    fields["num_registers"] = get_shape(tensors, registers, 3)[1] if registers else 0
    fields["num_classes"] = get_shape(tensors, "head.weight", 2)[0] if "head.weight" in tensors else 0
    if fields["depth"]:
        fields |= infer_block_fields(tensors)
    pooling = "class" if fields["class_token"] else "average"
    if "attn_pool.latent" in tensors:
        pooling = "attention"
    elif "fc_norm.weight" in tensors:
        pooling, fields["norm_after_pool"] = "average", True
    return {**fields, "pooling": pooling, **infer_stem(tensors)}


def infer_block_fields(tensors: Tensors) -> Fields:
    """Infer the fields that the first block shows."""
    fields: Fields = {"qk_norm": "blocks.0.attn.q_norm.weight" in tensors}
    fields["qkv_bias"] = "blocks.0.attn.qkv.bias" in tensors
    if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & set(tensors):
        fields["layer_scale"] = 1.0
    first, last = ("fc1", "fc2") if "blocks.0.mlp.fc1.weight" in tensors else ("w12", "w3")
    hidden = get_shape(tensors, f"blocks.0.mlp.{first}.weight", 2)[0]
    fields["mlp_dim"] = get_shape(tensors, f"blocks.0.mlp.{last}.weight", 2)[1]
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


def parse_model_args(config: Fields, arguments: Fields) -> Fields:
    """Return the fields of config.json that tensor shapes do not show."""
    fields: Fields = {}
    if "img_size" in arguments:
        fields |= ViTConfig.cast_fields({"image_size": arguments["img_size"]})
    if "num_heads" in arguments:
        fields |= ViTConfig.cast_fields({"num_heads": arguments["num_heads"]})
    if act := arguments.get("act_layer"):
        fields["activation"] = translate_value(act, ACTIVATIONS, "activation")
    pool = arguments.get("global_pool") or config.get("global_pool")
    if isinstance(pool, str) and pool in POOLS:
        fields["pooling"] = POOLS[pool]
    return fields


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


def parse_preprocess(config: Any) -> Fields:
    """Convert timm's pretrained_cfg. Its input size is ignored: it may be that of the entry point."""
    if not isinstance(config, dict):
        return {}
    names = {"mean": "mean", "std": "std", "crop_pct": "crop", "interpolation": "interpolation"}
    fields = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    if config.get("crop_mode") == "squash":
        fields["resize"] = "squash"
    return fields


def timm_config(config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> Fields:
    """Return the config.json that timm reads."""
    size = SIZE_NAMES.get(config.embed_dim, "base")
    arguments: Fields = {"img_size": list(config.image_size), "patch_size": size_to_json(config.patch_size)}
    arguments |= {"embed_dim": config.embed_dim, "depth": config.depth, "num_heads": config.num_heads}
    arguments |= {"num_classes": config.num_classes, "in_chans": config.in_channels}
    arguments["mlp_ratio"] = config.mlp_dim / config.embed_dim
    options: Fields = {
        "class_token": (config.class_token, True),
        "global_pool": ({v: k for k, v in POOLS.items()}[config.pooling], "token"),
        "fc_norm": (config.norm_after_pool, config.pooling == "average"),
        "reg_tokens": (config.num_registers, 0),
        "no_embed_class": (config.num_positioned == 0 and config.num_prefix > 0, False),
        "qkv_bias": (config.qkv_bias, True),
        "qk_norm": (config.qk_norm, False),
        "init_values": (config.layer_scale, None),
        "act_layer": (config.activation, "gelu"),
    }
    arguments |= {name: value for name, (value, default) in options.items() if value != default}
    result: Fields = {"architecture": f"vit_{size}_patch16_224", "num_classes": config.num_classes}
    if config.distillation:
        result["architecture"] = "deit_base_distilled_patch16_224"
    result |= {"num_features": config.embed_dim, "global_pool": arguments.get("global_pool", "token")}
    result["model_args"] = arguments
    result["pretrained_cfg"] = {
        "input_size": [config.in_channels, *config.image_size],
        "interpolation": preprocess["interpolation"],
        "crop_pct": preprocess["crop"],
        "crop_mode": "squash" if preprocess["resize"] == "squash" else "center",
        "mean": list(preprocess["mean"]),
        "std": list(preprocess["std"]),
        "num_classes": config.num_classes,
    }
    return {**result, "label_names": list(labels)} if labels else result
