"""transformers' image towers of CLIP, SigLIP and SigLIP 2 (NaFlex at a fixed grid), alone or with a text tower."""

import math
from typing import Any, ClassVar

import torch

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
    note_if,
)
from ..mapping import Patch, PixelFirst, Rule, Squeezed, TensorMap
from .transformers_json import (
    parse_activation,
    parse_labels,
    parse_preprocess,
    require_config,
    shared_config,
    stated_size,
    transformers_processor,
)

PATCH = "embeddings.patch_embedding.weight"
LAYER = "encoder.layers.{}"
TENSOR_MAP: TensorMap = {
    "class_token": Squeezed("embeddings.class_embedding", lead=2),
    "positions.table": Squeezed("embeddings.position_embedding.weight"),
    "patch_embed.proj": Patch("embeddings.patch_embedding"),
    "norm_pre": Rule("pre_layrnorm"),  # spelled so
    "blocks.{}.norm1": Rule(LAYER + ".layer_norm1"),
    "blocks.{}.attention.qkv": Rule(LAYER + ".self_attn", (".q_proj", ".k_proj", ".v_proj")),
    "blocks.{}.attention.out": Rule(LAYER + ".self_attn.out_proj"),
    "blocks.{}.norm2": Rule(LAYER + ".layer_norm2"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.fc1"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.fc2"),
    "norm": Rule("post_layernorm"),
    "pre_logits": Rule("visual_projection"),
    "head": Rule("classifier"),
    "pool.probe": Rule("head.probe"),
    **{
        f"pool.{part}.{suffix}": Rule(f"head.attention.{part}_{suffix}")
        for part in ("q", "kv")
        for suffix in ("weight", "bias")
    },
    "pool.out": Rule("head.attention.out_proj"),
    "pool.norm": Rule("head.layernorm"),
    "pool.fc1": Rule("head.mlp.fc1"),
    "pool.fc2": Rule("head.mlp.fc2"),
}
NAFLEX = {
    "patch_embed.proj.weight": PixelFirst("embeddings.patch_embedding.weight"),
    "patch_embed.proj.bias": Rule("embeddings.patch_embedding.bias"),
}
PACKED = "head.attention.in_proj_"  # queries, keys and values of the pooling head
TEXT_TOWER = ("text_model.", "text_projection.", "logit_scale", "logit_bias")
OUTSIDE = ("visual_projection.", "classifier.")  # beside vision_model.

# kind: activation, epsilon and heads, if config.json omits them
DEFAULTS: dict[str, tuple[str, float, int]] = {
    "clip": ("quick_gelu", 1e-5, 12),
    "siglip": ("gelu_pytorch_tanh", 1e-6, 12),
    "siglip2": ("gelu_pytorch_tanh", 1e-6, 12),
}
NAMES = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}


class TransformersCLIP(Family):
    """huggingface/transformers: image towers of CLIP, SigLIP and SigLIP 2."""

    name = "transformers"
    variant = "clip"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pos_embed": ("learned",),
        "pooling": ("class", "average", "attention"),
        "distillation": (False,),
        "num_registers": (0,),
        "layer_scale": (None,),
        "pre_logits": (None,),
        "qk_norm": (False,),
        "activation": ("gelu", "gelu_tanh", "quick_gelu"),
        "pool_heads": (None,),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers"}
    preprocess: ClassVar[Fields] = {"resize": "squash"}

    def matches(self, source: Source) -> bool:
        return any(n.endswith(PATCH) for n in source.tensors) and any("self_attn.q_proj" in n for n in source.tensors)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = "vision_model." if f"vision_model.{PATCH}" in source.tensors else ""
        wanted = (prefix, *OUTSIDE)
        tensors = {
            n.removeprefix(prefix): t
            for n, t in source.tensors.items()
            if n.startswith(wanted) and not n.startswith(TEXT_TOWER) and not n.endswith("position_ids")
        }
        for suffix in ("weight", "bias"):
            if PACKED + suffix in tensors:
                packed = tensors.pop(PACKED + suffix)
                width = len(packed) // 3
                tensors[f"head.attention.q_{suffix}"] = packed[:width]
                tensors[f"head.attention.kv_{suffix}"] = packed[width:]
        return tensors, {"bare": not prefix, "use_head": "head.probe" in tensors}

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        tensors = dict(tensors)
        for suffix in ("weight", "bias"):
            parts = [tensors.pop(f"head.attention.{part}_{suffix}", None) for part in ("q", "kv")]
            if parts[0] is not None and parts[1] is not None:
                tensors[PACKED + suffix] = torch.cat([parts[0], parts[1]])
        bare = quirks.get("bare") and not config.projection_dim and not config.num_classes
        return tensors if bare else {n if n.startswith(OUTSIDE) else f"vision_model.{n}": t for n, t in tensors.items()}

    def split_extras(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """A classifier averages the tokens, those of CLIP before the last norm: other pooling is not used."""
        if "classifier.weight" not in tensors:
            return tensors, {}
        unused = ("post_layernorm.",) if "embeddings.class_embedding" in tensors else ("head.",)
        extras = {n: t for n, t in tensors.items() if n.startswith(unused)}
        return {n: t for n, t in tensors.items() if n not in extras}, extras

    def join_extras(self, tensors: Tensors, extras: Tensors, config: ViTConfig) -> Tensors:
        """The inverse of `split_extras`; a model with a new head is not one of transformers' classifiers any more."""
        unused = {n: t for n, t in extras.items() if n.startswith(("post_layernorm.", "head."))}
        return {**tensors, **unused} if config.num_classes else tensors

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        kind = infer_kind(source, tensors)
        activation, eps, heads = DEFAULTS[kind]
        unstated = require_config(source, overrides, "num_heads", "norm_eps", "activation")
        config = vision_config(source)
        if (kind == "clip") != ("embeddings.class_embedding" in tensors):
            raise CheckpointError(f"config.json is that of {NAMES[kind]}, but the tensors are not.")
        fields: Fields = {**self.defaults, **infer_fields(tensors, overrides, config)}
        fields["num_heads"] = config.get("num_attention_heads", heads)
        fields["norm_eps"] = config.get("layer_norm_eps", eps)
        fields["activation"] = parse_activation(config, activation)
        if kind == "siglip2":
            fields["pos_embed_resample"] = "siglip2"
        assumed = {"pooling": "this model does not pool"} if fields["pooling"] == "average" else {}
        text = "only the image tower is read, not the text tower."
        return Metadata(
            fields,
            preprocess=default_preprocess(kind) | parse_preprocess(source.processor),
            labels=parse_labels(source.config.get("id2label")),
            notes=note_if(source, TEXT_TOWER[:2], Note(text, "text_tower_skipped")),
            assumed=unstated | ({} if fields["num_classes"] else assumed),
            architecture=kind,
            stated_size=config.get("image_size"),
        )

    def equivalent(self, config: ViTConfig) -> ViTConfig:
        """The norm of the class token is the same before and after it is picked."""
        is_clip = config.pooling == "class" and config.norm_pre and config.final_norm and not config.num_classes
        return config.replace(norm_after_pool=True) if is_clip else config

    def unsupported(self, config: ViTConfig) -> list[str]:
        problems = super().unsupported(config)
        clip = config.class_token and config.norm_pre and not config.patch_bias
        siglip = not (config.class_token or config.norm_pre or config.norm_after_pool) and config.patch_bias
        if not clip and not siglip:
            problems.append("other tokens, norms or patch projection than those of CLIP or SigLIP")
        if config.num_classes and config.pooling != "average":
            problems.append(f"num_classes={config.num_classes}, unless it averages its tokens")
        if config.image_size[0] != config.image_size[1] or config.patch_size[0] != config.patch_size[1]:
            problems.append(f"image_size={config.image_size} and patch_size={config.patch_size} (only squares)")
        return problems

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        return int(config.class_token)

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        if config.pos_embed_resample == "siglip2":
            return {**TENSOR_MAP, **NAFLEX}
        return TENSOR_MAP

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        processor = transformers_processor(preprocess)
        document = clip_config(config, labels, quirks)
        document.get("vision_config", document).update(stated_size(preprocess))
        return {"config.json": document, "preprocessor_config.json": processor}


def vision_config(source: Source) -> Fields:
    """Return the part of config.json that is about the image tower."""
    config = source.config.get("vision_config", source.config)
    if not isinstance(config, dict):
        raise CheckpointError("config.json has a vision_config that is not an object.")
    return config


def infer_kind(source: Source, tensors: Tensors) -> str:
    """Tell CLIP, SigLIP and SigLIP 2 (NaFlex) apart, by config.json or tensor names."""
    kind = source.config.get("model_type")
    if kind is not None:
        for name in sorted(DEFAULTS, key=len, reverse=True):
            if kind in (name, f"{name}_vision_model"):
                return name
        raise CheckpointError(
            f"config.json has the model_type {kind!r}, which patchword does not read. "
            "`patchword models` lists what it reads."
        )
    if "embeddings.class_embedding" in tensors:
        return "clip"
    return "siglip2" if PATCH in tensors and tensors[PATCH].ndim == 2 else "siglip"


def default_preprocess(kind: str) -> Fields:
    """Return the preprocessing of a model without preprocessor_config.json."""
    if kind == "clip":
        return {"statistics": "clip", "resize": "cover"}
    return {"interpolation": "bilinear"} if kind == "siglip2" else {}


def infer_fields(tensors: Tensors, overrides: Fields, config: Fields) -> Fields:
    """Infer the fields that tensors show."""
    is_clip = "embeddings.class_embedding" in tensors
    channels = ViTConfig.cast_fields({"in_channels": config.get("num_channels", 3)})["in_channels"]
    if tensors[PATCH].ndim == 2:  # SigLIP 2 takes flattened patches
        width, patch_dim = get_shape(tensors, PATCH, 2)
        side = math.isqrt(max(0, patch_dim // max(1, channels)))
        ph, pw = ViTConfig.cast_fields({"patch_size": config.get("patch_size", side)})["patch_size"]
    else:
        width, channels, ph, pw = get_shape(tensors, PATCH, 4)
    fields: Fields = {"patch_size": (ph, pw), "in_channels": channels, "embed_dim": width, "class_token": is_clip}
    fields |= {"norm_pre": is_clip, "patch_bias": not is_clip}
    fields["depth"] = config.get("num_hidden_layers", count_blocks(tensors, "encoder.layers.", "."))
    fields["mlp_dim"] = get_shape(tensors, LAYER.format(0) + ".mlp.fc1.weight", 2)[0]
    fields["num_classes"] = get_shape(tensors, "classifier.weight", 2)[0] if "classifier.weight" in tensors else 0
    positions = get_shape(tensors, "embeddings.position_embedding.weight", 2)[0]
    fields["image_size"] = infer_image_size(positions - is_clip, (ph, pw), overrides)
    if "visual_projection.weight" in tensors:
        fields["projection_dim"] = get_shape(tensors, "visual_projection.weight", 2)[0]
    if fields["num_classes"]:
        return fields | {"pooling": "average", "final_norm": not is_clip}
    if is_clip:
        return fields | {"pooling": "class", "norm_after_pool": True}
    return fields | {"pooling": "attention" if config.get("vision_use_head", True) else "average"}


def clip_config(config: ViTConfig, labels: tuple[str, ...] | None, quirks: Fields) -> Fields:
    """Return the config.json that transformers reads."""
    is_naflex = config.pos_embed_resample == "siglip2"
    kind = "clip" if config.class_token else "siglip2" if is_naflex else "siglip"
    vision: Fields = {**shared_config(config, None), "intermediate_size": config.mlp_dim}
    vision = {k: v for k, v in vision.items() if k not in ("id2label", "label2id")}
    if kind == "siglip2":
        vision |= {"num_patches": config.num_patches}
        del vision["image_size"]
    if kind == "clip":
        vision["projection_dim"] = config.projection_dim or 512
    else:
        has_unused_head = config.num_classes > 0 and quirks.get("use_head", False)
        vision["vision_use_head"] = config.pooling == "attention" or has_unused_head
    vision["model_type"] = f"{kind}_vision_model"
    if config.num_classes:
        head = shared_config(config, labels)
        return {
            "architectures": [f"{NAMES[kind]}ForImageClassification"],
            "model_type": kind,
            "vision_config": vision,
            **{name: head[name] for name in ("id2label", "label2id")},
        }
    return {"architectures": [f"{NAMES[kind]}VisionModel{'WithProjection' if config.projection_dim else ''}"], **vision}
