"""transformers' image towers of AIMv2 (arXiv:2411.14402): RMSNorm, SwiGLU, and pooling by a learned query."""

import re
from typing import Any, ClassVar

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
    translate_value,
)
from ..mapping import Patch, Rule, Squeezed, TensorMap
from .transformers_json import parse_preprocess, require_config, shared_config, stated_size, transformers_processor

PATCH = "embeddings.patch_embed.weight"
LAYER = "encoder.layers.{}"
TENSOR_MAP: TensorMap = {
    "positions.table": Squeezed("embeddings.position_embedding.weight"),
    "patch_embed.proj": Patch("embeddings.patch_embed"),
    "patch_embed.norm_out": Rule("embeddings.rms_norm"),
    "blocks.{}.norm1": Rule(LAYER + ".rms_norm1"),
    "blocks.{}.attention.qkv": Rule(LAYER + ".attention", (".q_proj", ".k_proj", ".v_proj")),
    "blocks.{}.attention.out": Rule(LAYER + ".attention.out_proj"),
    "blocks.{}.norm2": Rule(LAYER + ".rms_norm2"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".ffn", (".gate_proj", ".up_proj")),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".ffn.down_proj"),
    "norm": Rule("rms_norm"),
    "pool.probe": Rule("head.cls_token"),
    "pool.kv": Rule("head", (".k_proj", ".v_proj")),
    "pool.out": Rule("head.output_proj"),
    "pre_logits": Rule("visual_projection"),
}
# Apple's own files on the hub, of the class that they bring along: pattern of a name, and transformers' name.
APPLE = (
    (r"preprocessor\.patchifier\.proj\.", "embeddings.patch_embed."),
    (r"preprocessor\.patchifier\.norm\.", "embeddings.rms_norm."),
    (r"preprocessor\.pos_embed$", "embeddings.position_embedding.weight"),
    (r"trunk\.post_trunk_norm\.", "rms_norm."),
    (r"trunk\.blocks\.(\d+)\.norm_([12])\.", r"encoder.layers.\1.rms_norm\2."),
    (r"trunk\.blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.attention.out_proj."),
    (r"trunk\.blocks\.(\d+)\.mlp\.fc1\.", r"encoder.layers.\1.ffn.gate_proj."),
    (r"trunk\.blocks\.(\d+)\.mlp\.fc2\.", r"encoder.layers.\1.ffn.down_proj."),
    (r"trunk\.blocks\.(\d+)\.mlp\.fc3\.", r"encoder.layers.\1.ffn.up_proj."),
    (r"trunk\.blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.attention.qkv."),
)
APPLE_PATCH = "preprocessor.patchifier.proj.weight"
TEXT_TOWER = ("text_model.", "text_projection.", "logit_scale")


class TransformersAIMv2(Family):
    """huggingface/transformers: Aimv2VisionModel."""

    name = "transformers"
    variant = "aimv2"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "norm_layer": ("rms_norm",),
        "norm_embed": (True,),
        "activation": ("swiglu",),
        "class_token": (False,),
        "pos_embed": ("learned", "sincos_mae"),
        "pooling": ("query", "average"),
        "norm_after_pool": (False,),
        "num_classes": (0,),
        "projection_dim": (None,),
    }
    defaults: ClassVar[Fields] = {
        "norm_layer": "rms_norm",
        "norm_embed": True,
        "activation": "swiglu",
        "class_token": False,
        "pos_embed_resample": "transformers",
        "num_classes": 0,
    }
    preprocess: ClassVar[Fields] = {"statistics": "clip"}

    def matches(self, source: Source) -> bool:
        if APPLE_PATCH in source.tensors:
            return "trunk.post_trunk_norm.weight" in source.tensors
        return any(n.endswith(PATCH) for n in source.tensors) and any("rms_norm1" in n for n in source.tensors)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        if APPLE_PATCH in source.tensors:
            return rename_apple(source.tensors), {}
        prefix = "vision_model." if f"vision_model.{PATCH}" in source.tensors else ""
        wanted = (prefix, "visual_projection.")
        tensors = {n.removeprefix(prefix): t for n, t in source.tensors.items() if n.startswith(wanted)}
        unwanted = (*TEXT_TOWER, "embeddings.position_ids")
        return {n: t for n, t in tensors.items() if not n.startswith(unwanted)}, {}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        unstated = require_config(source, overrides, "num_heads", "norm_eps")
        config = source.config.get("vision_config", source.config)
        if not isinstance(config, dict):
            raise CheckpointError("config.json has a vision_config that is not an object.")
        translate_value(config.get("hidden_act", "silu"), {"silu": "swiglu"}, "activation")
        width, channels, ph, pw = get_shape(tensors, PATCH, 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields["depth"] = config.get("num_hidden_layers", count_blocks(tensors, "encoder.layers.", "."))
        fields["num_heads"] = config.get("num_attention_heads", 8)
        fields["norm_eps"] = config.get("rms_norm_eps", 1e-5)
        fields["mlp_dim"] = get_shape(tensors, LAYER.format(0) + ".ffn.down_proj.weight", 2)[1]
        fields["mlp_bias"] = config.get("mlp_bias", False)
        fields["qkv_bias"] = fields["out_bias"] = config.get("qkv_bias", False)
        if not config.get("is_native", False):
            count = get_shape(tensors, "embeddings.position_embedding.weight", 2)[0]
            fields["image_size"] = infer_image_size(count, (ph, pw), overrides)
        else:  # "native": positions are computed for the grid at hand
            fields |= {"pos_embed": "sincos_mae", "image_size": config.get("image_size", 224)}
        pools = config.get("use_head", True) and APPLE_PATCH not in source.tensors
        fields["pooling"] = "query" if pools else "average"
        if "visual_projection.weight" in tensors:
            fields["projection_dim"] = get_shape(tensors, "visual_projection.weight", 2)[0]
        text = "only the image tower is read, not the text tower."
        return Metadata(
            fields,
            preprocess=parse_preprocess(source.processor),
            notes=note_if(source, TEXT_TOWER[:2], Note(text, "text_tower_skipped")),
            assumed=unstated | ({} if pools else {"pooling": "this model does not pool"}),
            architecture="aimv2",
            stated_size=config.get("image_size"),
        )

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        return 0

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        result: Fields = {"architectures": ["Aimv2VisionModel"], "model_type": "aimv2_vision_model"}
        result |= {**shared_config(config, None), "intermediate_size": config.mlp_dim, "hidden_act": "silu"}
        result |= {"rms_norm_eps": config.norm_eps, "is_native": config.pos_embed == "sincos_mae"}
        result |= {"use_head": config.pooling == "query", "mlp_bias": config.mlp_bias, "qkv_bias": config.qkv_bias}
        result |= stated_size(preprocess)
        return {"config.json": result, "preprocessor_config.json": transformers_processor(preprocess)}


def rename_apple(tensors: Tensors) -> Tensors:
    """Return the tensors of one of Apple's own files under transformers' names."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, replacement in APPLE:
            name = re.sub("^" + pattern, replacement, name)
        if ".attention.qkv." in name:
            parts = zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True)
            result |= {name.replace("qkv", part): chunk for part, chunk in parts}
        else:
            result[name] = tensor[0] if name == "embeddings.position_embedding.weight" else tensor
    return result
