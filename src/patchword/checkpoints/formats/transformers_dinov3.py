"""transformers' DINOv3 ViTs, which have rotary positions (arXiv:2508.10104)."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ...errors import CheckpointError
from ..family import Family, Fields, Metadata, Source, Tensors, count_blocks, get_shape, translate_value
from ..mapping import Patch, Rule, TensorMap, add_key_bias, remove_key_bias
from .transformers_json import (
    check_switches,
    parse_activation,
    parse_preprocess,
    require_config,
    shared_config,
    transformers_processor,
)

PROJECTION = "embeddings.patch_embeddings.weight"
LAYER = "layer.{}"
TENSOR_MAP: TensorMap = {
    "class_token": Rule("embeddings.cls_token"),
    "registers": Rule("embeddings.register_tokens"),
    "patch_embed.proj": Patch("embeddings.patch_embeddings"),
    "blocks.{}.norm1": Rule(LAYER + ".norm1"),
    "blocks.{}.attention.qkv": Rule(LAYER + ".attention", (".q_proj", ".k_proj", ".v_proj")),
    "blocks.{}.attention.out": Rule(LAYER + ".attention.o_proj"),
    "blocks.{}.add1.gamma": Rule(LAYER + ".layer_scale1.lambda1"),
    "blocks.{}.norm2": Rule(LAYER + ".norm2"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.up_proj"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.down_proj"),
    "blocks.{}.add2.gamma": Rule(LAYER + ".layer_scale2.lambda1"),
    "norm": Rule("norm"),
}
GATED = {"blocks.{}.mlp.fc1": Rule(LAYER + ".mlp", (".gate_proj", ".up_proj"))}
KEYS, QUERIES = ".k_proj.bias", ".q_proj.bias"


class TransformersDINOv3(Family):
    """huggingface/transformers: DINOv3ViTModel."""

    name = "transformers"
    variant = "dinov3"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pos_embed": ("rotary",),
        "rope": ("dinov3",),
        "class_token": (True,),
        "pooling": ("class",),
        "num_classes": (0,),
        "norm_after_pool": (False,),
    }
    defaults: ClassVar[Fields] = {"pos_embed": "rotary", "rope": "dinov3", "layer_scale": 1.0, "num_classes": 0}
    preprocess: ClassVar[Fields] = {"resize": "squash", "interpolation": "bilinear", "statistics": "imagenet"}
    passthrough: ClassVar[dict[str, str]] = {"mask_token": "embeddings.mask_token"}

    def matches(self, source: Source) -> bool:
        return PROJECTION in source.tensors and "layer.0.attention.q_proj.weight" in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        tensors = {n: t for n, t in source.tensors.items() if t.numel()}  # without registers, there is an empty tensor
        return add_key_bias(tensors, QUERIES, KEYS), {}

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        """Add what the class requires: a mask token, which only pre-training uses, and a tensor of registers."""
        tensors = tensors if config.key_bias else remove_key_bias(tensors, KEYS)
        token = tensors["embeddings.cls_token"]
        unused = {"mask_token": token.new_zeros(token.shape), "register_tokens": token[:, :0]}
        return {**{f"embeddings.{name}": t for name, t in unused.items()}, **tensors}

    def join_extras(self, tensors: Tensors, extras: Tensors, config: ViTConfig) -> Tensors:
        """The inverse of `split_extras`; Meta's files have a mask token of shape (1, D)."""
        joined = super().join_extras(tensors, extras, config)
        return {n: t.reshape(1, 1, -1) if n.endswith("mask_token") else t for n, t in joined.items()}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        unstated = require_config(source, overrides, "num_heads", "activation", "norm_eps")
        config = source.config
        width, channels, ph, pw = get_shape(tensors, PROJECTION, 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields |= {
            "depth": config.get("num_hidden_layers", count_blocks(tensors, "layer.", ".")),
            "image_size": config.get("image_size", 224),
        }
        fields["num_heads"] = config.get("num_attention_heads", 6)
        fields["norm_eps"] = config.get("layer_norm_eps", 1e-5)
        gated, has_key_bias = "layer.0.mlp.gate_proj.weight" in tensors, any(n.endswith(KEYS) for n in source.tensors)
        check_switches(config, {"use_gated_mlp": gated, "key_bias": has_key_bias})
        if gated:
            gate = config.get("hidden_act", "gelu") if config else "silu"
            fields["activation"] = translate_value(gate, {"silu": "swiglu"}, "activation of a gated MLP")
        else:
            fields["activation"] = parse_activation(config, "gelu")
        fields["mlp_dim"] = get_shape(tensors, "layer.0.mlp.down_proj.weight", 2)[1]
        fields["mlp_bias"] = config.get("mlp_bias", True)
        biases = {name: config.get(name, True) for name in ("query_bias", "value_bias")}
        if len(set(biases.values())) > 1:
            values = " and ".join(f"{name}={value}" for name, value in biases.items())
            raise CheckpointError(f"config.json has {values}; patchword reads models in which both are the same.")
        fields["qkv_bias"] = biases["query_bias"]
        fields["key_bias"] = not fields["qkv_bias"] or config.get("key_bias", False)
        fields["out_bias"] = config.get("proj_bias", True)
        if config.get("rope_theta", 100.0) != 100.0:
            fields["rope_base"] = config["rope_theta"]
        if "embeddings.register_tokens" in tensors:
            fields["num_registers"] = get_shape(tensors, "embeddings.register_tokens", 3)[1]
        preprocess = parse_preprocess(source.processor)
        return Metadata(fields, preprocess=preprocess, assumed=unstated, architecture="dinov3_vit")

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return {**TENSOR_MAP, **GATED} if config.activation == "swiglu" else TENSOR_MAP

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        result: Fields = {
            "architectures": ["DINOv3ViTModel"],
            "model_type": "dinov3_vit",
            **shared_config(config, None),
        }
        result |= {"intermediate_size": config.mlp_dim, "num_register_tokens": config.num_registers}
        result |= {"rope_theta": config.rope_base or 100.0, "use_gated_mlp": config.activation == "swiglu"}
        result |= {"hidden_act": "silu"} if config.activation == "swiglu" else {}
        result |= {"query_bias": config.qkv_bias, "value_bias": config.qkv_bias}
        result |= {"key_bias": config.qkv_bias and config.key_bias, "proj_bias": config.out_bias}
        result |= {"mlp_bias": config.mlp_bias, "layerscale_value": config.layer_scale}
        return {"config.json": result, "preprocessor_config.json": transformers_processor(preprocess)}
