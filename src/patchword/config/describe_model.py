"""The architecture of a model in words: what differs from the paper's ViT, or from a ResNet of convolutions."""

import dataclasses
from collections.abc import Callable
from typing import Any

from . import ModelConfig, ResNetConfig, ViTConfig

PLAIN = ViTConfig()
# Sizes, in which every model differs.
SIZE_FIELDS = {"image_size", "patch_size", "in_channels", "num_classes", "embed_dim", "depth", "num_heads"}
# Fields that the phrase of another field includes.
DETAILS = {"stem_layers", "stem_convs", "stem_width", "weight_standardization", "window_size", "local_attention_init"}
# Values that say no more than the sizes do.
IMPLIED: dict[str, Callable[[ViTConfig], Any]] = {
    "mlp_dim": lambda config: 4 * config.embed_dim,
    "head_dim": lambda config: config.embed_dim // config.num_heads,
    "pool_heads": lambda config: config.num_heads,
    "pool_mlp_dim": lambda config: config.mlp_dim,
    "pos_embed_prefix": lambda config: config.replace(pos_embed_prefix=None).num_positioned,
}
# A phrase for each field, or for each of its values. {value} is the value, {name} any field.
PHRASES: dict[str, str | dict[Any, str]] = {
    "mlp_dim": "MLPs of width {value}",
    "head_dim": "attention heads of width {value}",
    "stem": {
        "resnet": "a ResNet stem with {stem_layers} units per stage",
        "conv": "a convolutional stem with {stem_layers} channels",
    },
    "patch_norm": "LayerNorm before and after the patch projection",
    "patch_bias": "no bias in the patch projection",
    "norm_embed": "a norm after the patch projection",
    "norm_pre": "a norm before the first block",
    "class_token": "no class token",
    "distillation": "a distillation token with its own head",
    "num_registers": "{value} register tokens",
    "pos_embed": {
        "learned_2d": "learned 2-D position embeddings",
        "relative": "learned relative positions",
        "sincos": "sine-cosine position embeddings",
        "sincos_mae": "sine-cosine position embeddings, in MAE's order",
        "rotary": "rotary positions (RoPE)",
        "none": "no positions",
        "learned+rotary": "learned position embeddings, and rotary positions (RoPE)",
        "learned+relative": "learned position embeddings, and learned relative positions",
    },
    "pos_embed_prefix": "position embeddings for {value} of the prefix tokens",
    "relative_prefix": "relative positions that include the class token",
    "rope": {
        "eva02": "RoPE of EVA-02",
        "pe": "RoPE of Perception Encoder",
        "axial": "axial RoPE of RoPE-ViT",
        "mixed": "RoPE of RoPE-ViT with learned frequencies",
        "dinov3": "RoPE of DINOv3",
    },
    "rope_base": "RoPE with base {value}",
    "rope_reference": "RoPE with coordinates scaled to a grid of {value}",
    "rope_periods": "RoPE with the periods that the checkpoint stores",
    "pos_embed_resample": "position embeddings resampled as in {value}, if the image size changes",
    "attention_pattern": {
        "axial": "attention along rows and columns in turn",
        "local": "attention in windows of {window_size} patches",
    },
    "qkv_bias": "no bias of queries, keys and values",
    "key_bias": "no bias of keys",
    "out_bias": "no bias in the output projection of attention",
    "qk_norm": "norms of queries and keys",
    "attention_norm": "a norm before the output projection of attention",
    "mlp_norm": "a norm inside each MLP",
    "mlp_bias": "no bias in MLPs",
    "post_norm": "norms after the residual sums (post-norm)",
    "res_post_norm": "norms after the branches, inside the residual sums",
    "norm_layer": {"rms_norm": "RMSNorm"},
    "norm_eps": "norms with epsilon {value}",
    "activation": {"gelu_tanh": "tanh GELU", "quick_gelu": "quick GELU", "swiglu": "SwiGLU"},
    "layer_scale": "LayerScale",
    "pooling": {
        "average": "mean of the patches as image representation",
        "attention": "attention pooling (MAP) as image representation",
        "class+average": "class token and mean of the patches as image representation",
        "query": "attention pooling with a query as image representation",
    },
    "pool_heads": "attention pooling with {value} heads",
    "pool_mlp_dim": "attention pooling with an MLP of width {value}",
    "pool_prefix": "attention pooling that includes the prefix tokens",
    "norm_after_pool": "the final norm after pooling",
    "pre_logits": "a tanh layer of width {value} before the head",
    "projection_dim": "a projection to {value} dimensions, shared with texts",
    "final_norm": "no final norm",
}

RESNET_PHRASES: dict[str, dict[Any, str]] = {
    "spatial": {
        "local": "attention in windows of {window} pixels (SASA) with {heads} heads instead of 3x3 convolutions{start}",
        "axial": "axial attention with {heads} heads instead of 3x3 convolutions{start}",
    },
    "non_local": {
        "gaussian": "a Non-local block (Gaussian)",
        "embedded": "a Non-local block (embedded Gaussian)",
        "dot": "a Non-local block (dot product)",
        "concat": "a Non-local block (concatenation)",
    },
}


def describe_differences(config: ModelConfig) -> dict[str, str]:
    """Return a phrase for each field in which a model differs from the paper's ViT or a usual ResNet, sizes apart."""
    if isinstance(config, ResNetConfig):
        return describe_attention(config)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    texts = {name: format_value(name, value) for name, value in values.items()}
    phrases = {}
    for name, value in values.items():
        implied = {None, IMPLIED[name](config)} if name in IMPLIED else {getattr(PLAIN, name)}
        if name in SIZE_FIELDS | DETAILS or value in implied:
            continue
        phrase = PHRASES.get(name, name.replace("_", " ") + " {value}")
        phrase = phrase.get(value, "{value}") if isinstance(phrase, dict) else phrase
        phrases[name] = phrase.format(value=texts[name], **texts)
    if "rope" in phrases:  # in one phrase: "rotary positions (RoPE of DINOv3)"
        phrases["pos_embed"] = phrases["pos_embed"].replace("RoPE", phrases.pop("rope"))
    return phrases


def describe_attention(config: ResNetConfig) -> dict[str, str]:
    """Return a phrase for each field that adds attention to a ResNet."""
    start = f" from stage {config.spatial_stage + 1} of {len(config.layers)}" if config.spatial_stage else ""
    values = {"window": config.spatial_window, "heads": config.spatial_heads, "start": start}
    chosen = {name: phrases.get(getattr(config, name)) for name, phrases in RESNET_PHRASES.items()}
    return {name: phrase.format(**values) for name, phrase in chosen.items() if phrase}


def format_value(name: str, value: Any) -> str:
    """Format the value of a field."""
    if isinstance(value, tuple):
        return ("x" if name == "rope_reference" else ", ").join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
