"""timm's Vision Transformers: a folder with config.json, or a bare .safetensors or .pth state dict."""

import math
from typing import Any, ClassVar

from ...config import MAX_STAGES, ViTConfig
from ...errors import CheckpointError
from ..family import (
    Described,
    Family,
    Fields,
    Source,
    Tensors,
    count_blocks,
    guess_heads,
    image_size_for,
    known_word,
    prefix_positions,
    shape_of,
    size_value,
)
from ..mapping import Patch, Rule, Table

BACKBONE = "patch_embed.backbone"
STAGE = f"{BACKBONE}.stages.{{}}.blocks.{{}}"

TABLE: Table = {
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
    name = "timm"
    needs: ClassVar[dict[str, tuple[Any, ...]]] = {"pos_embed": ("learned",), "pooling": tuple(POOLS.values())}
    defaults: ClassVar[Fields] = {"weight_standardization": "timm", "pos_embed_resample": "timm"}
    preprocess: ClassVar[Fields] = {"crop": 0.9}

    def recognises(self, source: Source) -> bool:
        return "pos_embed" in source.tensors and any(n.startswith("patch_embed.") for n in source.tensors)

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        arguments = source.config.get("model_args") or {}
        if not isinstance(arguments, dict):
            raise CheckpointError("config.json has model_args that are not an object.")
        fields = {**self.defaults, **tensor_fields(tensors), **stated_fields(source.config, arguments)}
        if "num_heads" not in arguments:
            where = source.path.name
            fields["num_heads"] = guess_heads(fields["embed_dim"], given, where)
        given = {**given, **({"image_size": fields.pop("image_size")} if "image_size" in fields else {})}
        fields |= positions_of(tensors, fields, given, arguments.get("no_embed_class"))
        labels = source.config.get("label_names")
        return Described(
            fields,
            preprocess=stated_preprocess(source.config.get("pretrained_cfg")),
            labels=tuple(map(str, labels)) if isinstance(labels, list) else None,
        )

    def positioned(self, config: ViTConfig) -> int:
        """All prefix tokens have positions, or none (no_embed_class)."""
        return config.num_prefix if config.num_positioned == config.num_prefix else 0

    def table(self, config: ViTConfig) -> Table:
        table = {**TABLE, **({} if config.stem_layers else ROOT_ONLY)}
        return {**table, "norm": Rule("fc_norm")} if config.norm_after_pool else table

    def sidecars(self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> dict[str, Fields]:
        return {"config.json": timm_config(config, labels, preprocess)}


def tensor_fields(tensors: Tensors) -> Fields:
    """What the shapes of a timm-like state dict show; also for DeiT and DINOv2, which share the names."""
    width, channels, ph, pw = shape_of(tensors, "patch_embed.proj.weight", 4)
    fields: Fields = {"patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
    fields["depth"] = count_blocks(tensors, "blocks.", ".")
    fields["class_token"] = "cls_token" in tensors
    fields["distillation"] = "dist_token" in tensors
    registers = next((n for n in ("reg_token", "register_tokens") if n in tensors), None)
    fields["num_registers"] = shape_of(tensors, registers, 3)[1] if registers else 0
    fields["num_classes"] = shape_of(tensors, "head.weight", 2)[0] if "head.weight" in tensors else 0
    if fields["depth"]:
        fields |= block_fields(tensors)
    pooling = "class" if fields["class_token"] else "average"
    if "attn_pool.latent" in tensors:
        pooling = "attention"
    elif "fc_norm.weight" in tensors:
        pooling, fields["norm_after_pool"] = "average", True
    return {**fields, "pooling": pooling, **hybrid(tensors)}


def block_fields(tensors: Tensors) -> Fields:
    fields: Fields = {"qk_norm": "blocks.0.attn.q_norm.weight" in tensors}
    fields["qkv_bias"] = "blocks.0.attn.qkv.bias" in tensors
    if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & set(tensors):
        fields["layer_scale"] = 1.0
    first, last = ("fc1", "fc2") if "blocks.0.mlp.fc1.weight" in tensors else ("w12", "w3")
    hidden = shape_of(tensors, f"blocks.0.mlp.{first}.weight", 2)[0]
    fields["mlp_dim"] = shape_of(tensors, f"blocks.0.mlp.{last}.weight", 2)[1]
    if hidden == 2 * fields["mlp_dim"]:
        fields["activation"] = "swiglu"
    return fields


def hybrid(tensors: Tensors) -> Fields:
    root = next((n for n in (f"{BACKBONE}.stem.conv.weight", f"{BACKBONE}.conv.weight") if n in tensors), None)
    if root is None:
        return {}
    width, channels, _, _ = shape_of(tensors, root, 4)
    stages = min(count_blocks(tensors, f"{BACKBONE}.stages.", "."), MAX_STAGES + 1)  # the config refuses more
    units = tuple(count_blocks(tensors, f"{BACKBONE}.stages.{s}.blocks.", ".") for s in range(stages))
    return {"stem": "resnet", "stem_layers": units, "stem_width": width, "in_channels": channels}


def stated_fields(config: Fields, arguments: Fields) -> Fields:
    """What config.json says and shapes do not show."""
    fields: Fields = {}
    if "img_size" in arguments:
        fields |= ViTConfig.cast_fields({"image_size": arguments["img_size"]})
    if "num_heads" in arguments:
        fields |= ViTConfig.cast_fields({"num_heads": arguments["num_heads"]})
    if act := arguments.get("act_layer"):
        fields["activation"] = known_word(act, ACTIVATIONS, "activation")
    pool = arguments.get("global_pool") or config.get("global_pool")
    if isinstance(pool, str) and pool in POOLS:
        fields["pooling"] = POOLS[pool]
    return fields


def positions_of(tensors: Tensors, fields: Fields, given: Fields, no_embed_class: bool | None) -> Fields:
    """The image size and how many prefix tokens have positions, from the count of positions."""
    count = shape_of(tensors, "pos_embed", 3)[1]
    num_prefix = fields["class_token"] + fields["distillation"] + fields["num_registers"]
    stem = 4 * 2 ** max(0, len(fields["stem_layers"]) - 1) if "stem" in fields else 1
    stride = (fields["patch_size"][0] * stem, fields["patch_size"][1] * stem)
    size = given.get("image_size")
    patches = (size[0] // stride[0]) * (size[1] // stride[1]) if size else 0
    if no_embed_class is not None:
        prefix = 0 if no_embed_class else num_prefix
    elif 0 <= count - patches <= num_prefix and math.isqrt(patches) ** 2 != patches:
        prefix = count - patches  # a non-square model whose size the caller stated
    else:
        prefix = prefix_positions(count, num_prefix)
    return {"pos_embed_prefix": prefix, "image_size": image_size_for(count - prefix, stride, given)}


def stated_preprocess(config: Any) -> Fields:
    """Timm's pretrained_cfg as fields of ours; its input size may be the entry point's, so it is left alone."""
    if not isinstance(config, dict):
        return {}
    names = {"mean": "mean", "std": "std", "crop_pct": "crop", "interpolation": "interpolation"}
    fields = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    if config.get("crop_mode") == "squash":
        fields["resize"] = "squash"
    return fields


def timm_config(config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> Fields:
    """config.json as timm reads it back."""
    size = SIZE_NAMES.get(config.embed_dim, "base")
    arguments: Fields = {"img_size": list(config.image_size), "patch_size": size_value(config.patch_size)}
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
    arguments |= {name: value for name, (value, usual) in options.items() if value != usual}
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
