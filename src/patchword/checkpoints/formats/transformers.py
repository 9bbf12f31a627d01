"""transformers directories (`save_pretrained`): ViT, DeiT, DINOv2, ViT-MSN, ViTMAE and I-JEPA, whose names agree."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ...errors import CheckpointError, ConversionError, Note
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
    note_if,
    translate_value,
)
from ..mapping import Patch, Rule, TensorMap
from .transformers_json import (
    check_switches,
    parse_activation,
    parse_labels,
    parse_preprocess,
    require_config,
    shared_config,
    stated_size,
    transformers_processor,
)

PROJECTION = "embeddings.patch_embeddings.projection.weight"
LAYER = "encoder.layer.{}"
SHARED: TensorMap = {
    "class_token": Rule("embeddings.cls_token"),
    "distillation_token": Rule("embeddings.distillation_token"),
    "positions.table": Rule("embeddings.position_embeddings"),
    "patch_embed.proj": Patch("embeddings.patch_embeddings.projection"),
    "blocks.{}.attention.qkv": Rule(LAYER + ".attention.attention", (".query", ".key", ".value")),
    "blocks.{}.attention.out": Rule(LAYER + ".attention.output.dense"),
    "norm": Rule("layernorm"),
}
VIT: TensorMap = {
    **SHARED,
    "registers": Rule("embeddings.distillation_token"),  # a DeiT with one head: its second token is a register
    "blocks.{}.norm1": Rule(LAYER + ".layernorm_before"),
    "blocks.{}.norm2": Rule(LAYER + ".layernorm_after"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".intermediate.dense"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".output.dense"),
    "pre_logits": Rule("pooler.dense"),
}
DINO: TensorMap = {
    **SHARED,
    "registers": Rule("embeddings.register_tokens"),
    "blocks.{}.norm1": Rule(LAYER + ".norm1"),
    "blocks.{}.add1.gamma": Rule(LAYER + ".layer_scale1.lambda1"),
    "blocks.{}.norm2": Rule(LAYER + ".norm2"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.fc1"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.fc2"),
    "blocks.{}.add2.gamma": Rule(LAYER + ".layer_scale2.lambda1"),
}
DINO_SWIGLU: TensorMap = {
    **DINO,
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.weights_in"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.weights_out"),
}
ONE_HEAD: TensorMap = {"head": Rule("classifier")}
TWO_HEADS: TensorMap = {"head": Rule("cls_classifier"), "head_distilled": Rule("distillation_classifier")}

# model_type: prefix of its tensors, class with a head, LayerNorm's epsilon if config.json omits it
KINDS: dict[str, tuple[str, str, float]] = {
    "vit": ("vit", "ViTForImageClassification", 1e-12),
    "deit": ("deit", "DeiTForImageClassification", 1e-12),
    "dinov2": ("dinov2", "Dinov2ForImageClassification", 1e-6),
    "dinov2_with_registers": ("dinov2_with_registers", "Dinov2WithRegistersForImageClassification", 1e-6),
    "vit_msn": ("vit", "ViTMSNForImageClassification", 1e-6),
    "vit_mae": ("vit", "ViTMAEForImageClassification", 1e-12),  # there is no such class, only ViTMAEModel
    "ijepa": ("ijepa", "IJepaForImageClassification", 1e-12),
}
DECODER = "decoder."  # of ViTMAEForPreTraining


class Transformers(Family):
    """huggingface/transformers: ViT, DeiT, DINOv2, ViT-MSN, ViTMAE, I-JEPA."""

    name = "transformers"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pooling": ("class", "average", "class+average"),
        "pos_embed": ("learned",),
        "norm_pre": (False,),
        "norm_after_pool": (False,),
        "key_bias": (True,),
        "norm_layer": ("layer_norm",),
        "res_post_norm": (False,),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers", "norm_eps": 1e-12}
    preprocess: ClassVar[Fields] = {"resize": "squash", "interpolation": "bilinear"}
    passthrough: ClassVar[dict[str, str]] = {"mask_token": "embeddings.mask_token"}

    def matches(self, source: Source) -> bool:
        return any(n.endswith(PROJECTION) for n in source.tensors)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = next((n.removesuffix(PROJECTION) for n in source.tensors if n.endswith(PROJECTION)), "")
        tensors = {n.removeprefix(prefix): t for n, t in source.tensors.items() if not n.startswith(DECODER)}
        quirks: Fields = {} if prefix else {"bare": True}
        if prefix and any(n.startswith(LAYER.split("{", maxsplit=1)[0]) for n in source.tensors):
            quirks["bare_layers"] = True  # transformers 5.23 writes ViT-MSN so
        kind = source.config.get("model_type")
        if kind in ("vit_msn", "vit_mae"):
            quirks |= {"model_type": kind, "mask_ratio": source.config.get("mask_ratio", 0.75)}
        return tensors, quirks

    def split_extras(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """The pooler of I-JEPA reads the first patch, for lack of a class token: it is kept, but not used."""
        tensors, extras = super().split_extras(tensors)
        pooler = {n: t for n, t in tensors.items() if n.startswith("pooler.") and "embeddings.cls_token" not in tensors}
        return {n: t for n, t in tensors.items() if n not in pooler}, {**extras, **pooler}

    def join_extras(self, tensors: Tensors, extras: Tensors, config: ViTConfig) -> Tensors:
        pooler = {n: t for n, t in extras.items() if n.startswith("pooler.") and not config.num_classes}
        return {**super().join_extras(tensors, extras, config), **pooler}

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        prefix = "" if quirks.get("bare") else KINDS[model_type(config, quirks)][0] + "."
        bare: tuple[str, ...] = ("classifier.", "cls_classifier.", "distillation_classifier.")
        bare += (LAYER.split("{", maxsplit=1)[0],) if quirks.get("bare_layers") else ()
        return {n if n.startswith(bare) else prefix + n: t for n, t in tensors.items()}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        unstated = require_config(source, overrides, "norm_eps", "activation")
        json_config = source.config
        kind = json_config.get("model_type") or infer_model_type(tensors)
        if not isinstance(kind, str) or kind not in KINDS:
            raise CheckpointError(
                f"config.json has the model_type {kind!r}, which patchword does not read with these tensors. "
                "`patchword models` lists what it reads."
            )
        width, channels, ph, pw = get_shape(tensors, PROJECTION, 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields |= infer_block_fields(tensors, kind, json_config)
        fields |= infer_token_fields(tensors, kind)
        seen = {"qkv_bias": fields["qkv_bias"], "use_swiglu_ffn": fields["activation"] == "swiglu"}
        check_switches(json_config, seen)
        if fields.get("pre_logits"):  # the pooler is the tanh layer of the paper's pre-training
            translate_value(json_config.get("pooler_act", "tanh"), {"tanh": "tanh"}, "pooler_act")
        heads = json_config.get("num_attention_heads")
        fields["num_heads"] = heads if heads else infer_num_heads(width, overrides, source.path.name)
        positions = get_shape(tensors, "embeddings.position_embeddings", 3)[1]
        if "image_size" in json_config:
            overrides = {**overrides, **ViTConfig.cast_fields({"image_size": json_config["image_size"]})}
        fields["image_size"] = infer_image_size(positions - fields["pos_embed_prefix"], (ph, pw), overrides)
        return Metadata(
            fields,
            preprocess=default_preprocess(kind) | parse_preprocess(source.processor),
            labels=parse_labels(json_config.get("id2label")),
            notes=note_if(
                source, (DECODER,), Note("the decoder of masked pre-training is not read.", "decoder_skipped")
            ),
            assumed=unstated | ({"pooling": "this model does not pool"} if kind in ("vit_mae", "ijepa") else {}),
            architecture=kind,
            stated_size=json_config.get("image_size"),
        )

    def unsupported(self, config: ViTConfig) -> list[str]:
        problems = super().unsupported(config)
        if config.class_token == (config.pooling == "average"):
            problems.append(f"pooling={config.pooling!r} {'with' if config.class_token else 'without'} a class token")
        return problems

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        one_head_deit = config.layer_scale is None and config.num_registers == 1
        return config.class_token + config.distillation + one_head_deit

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        is_dino = config.layer_scale is not None
        trunk = (DINO_SWIGLU if config.activation == "swiglu" else DINO) if is_dino else VIT
        return {**trunk, **(TWO_HEADS if config.distillation else ONE_HEAD)}

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        processor = transformers_processor(preprocess)
        document = {**transformers_config(config, labels, quirks), **stated_size(preprocess)}
        return {"config.json": document, "preprocessor_config.json": processor}


def model_type(config: ViTConfig, quirks: Fields) -> str:
    """Return the model_type for a config."""
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_registers else "dinov2"
    if not config.class_token:
        return "ijepa"
    if config.distillation or config.num_registers:
        return "deit"
    kind = str(quirks.get("model_type", "vit"))
    return "vit" if kind == "vit_mae" and config.num_classes else kind


def infer_model_type(tensors: Tensors) -> str:
    """Infer the model_type from tensor names."""
    if "embeddings.register_tokens" in tensors:
        return "dinov2_with_registers"
    if "encoder.layer.0.layer_scale1.lambda1" in tensors:
        return "dinov2"
    if "embeddings.cls_token" not in tensors:
        return "ijepa"
    return "deit" if "embeddings.distillation_token" in tensors else "vit"


def default_preprocess(kind: str) -> Fields:
    """Return the preprocessing of a model without preprocessor_config.json, if it is not that of ViT."""
    if "dino" in kind:
        return {"resize": "cover", "crop": 0.875, "interpolation": "bicubic", "statistics": "imagenet"}
    if kind == "deit":
        return {"crop": 0.875, "interpolation": "bicubic"}
    return {"statistics": "imagenet"} if kind in ("vit_mae", "vit_msn") else {}


def infer_block_fields(tensors: Tensors, kind: str, json_config: Fields) -> Fields:
    """Infer depth and the fields that the first block shows."""
    fields: Fields = {"depth": json_config.get("num_hidden_layers", count_blocks(tensors, "encoder.layer.", "."))}
    fields["qkv_bias"] = "encoder.layer.0.attention.attention.query.bias" in tensors
    fields["norm_eps"] = json_config.get("layer_norm_eps", KINDS[kind][2])
    fields["activation"] = parse_activation(json_config, "gelu")
    if "encoder.layer.0.layer_scale1.lambda1" in tensors:
        fields["layer_scale"] = 1.0
    for name in ("mlp.weights_out", "mlp.fc2", "output.dense"):
        if f"encoder.layer.0.{name}.weight" in tensors:
            fields["mlp_dim"] = get_shape(tensors, f"encoder.layer.0.{name}.weight", 2)[1]
            if name == "mlp.weights_out":
                fields["activation"] = "swiglu"
            break
    return fields


def infer_token_fields(tensors: Tensors, kind: str) -> Fields:
    """Infer prefix tokens, pooling and heads."""
    two_heads = "distillation_classifier.weight" in tensors
    head = "cls_classifier.weight" if two_heads else "classifier.weight"
    fields: Fields = {"num_classes": get_shape(tensors, head, 2)[0] if head in tensors else 0}
    fields |= {"distillation": two_heads, "pos_embed_prefix": 1, "pooling": "class"}
    if "embeddings.cls_token" not in tensors:
        fields |= {"class_token": False, "pooling": "average", "pos_embed_prefix": 0}
    if "embeddings.distillation_token" in tensors:
        fields["pos_embed_prefix"] = 2
        fields["num_registers"] = 0 if two_heads else 1
    if "embeddings.register_tokens" in tensors:
        fields["num_registers"] = get_shape(tensors, "embeddings.register_tokens", 3)[1]
        fields["pos_embed_resample"] = "timm"  # antialiased bicubic
    if "dino" in kind and fields["num_classes"]:
        fields["pooling"] = "class+average"
    if "pooler.dense.weight" in tensors and not fields["num_classes"]:  # classifiers do not use the pooler
        fields["pre_logits"] = get_shape(tensors, "pooler.dense.weight", 2)[0]
    return fields


def transformers_config(config: ViTConfig, labels: tuple[str, ...] | None, quirks: Fields) -> Fields:
    """Return the config.json that transformers reads."""
    kind = model_type(config, quirks)
    name = KINDS[kind][1] + ("WithTeacher" if config.distillation else "")
    if not config.num_classes:
        name = name.replace("ForImageClassification", "Model").replace("WithTeacher", "")
    result: Fields = {"architectures": [name], "model_type": kind, **shared_config(config, labels)}
    result |= {"qkv_bias": config.qkv_bias, "hidden_dropout_prob": config.dropout}
    result |= {"attention_probs_dropout_prob": config.attention_dropout}
    if "dino" in kind:
        result |= {"mlp_ratio": dino_mlp_ratio(config), "use_swiglu_ffn": config.activation == "swiglu"}
        return result | ({"num_register_tokens": config.num_registers} if config.num_registers else {})
    result["intermediate_size"] = config.mlp_dim
    if kind == "vit_mae":
        result["mask_ratio"] = quirks["mask_ratio"]
    if config.pre_logits:
        result |= {"pooler_output_size": config.pre_logits, "pooler_act": "tanh"}
    return result


def dino_mlp_ratio(config: ViTConfig) -> int:
    """Find the integer mlp_ratio for mlp_dim; with SwiGLU the width is two thirds, rounded up to a multiple of 8."""
    for ratio in range(1, 17):
        width = ratio * config.embed_dim
        if (width if config.activation != "swiglu" else (int(width * 2 / 3) + 7) // 8 * 8) == config.mlp_dim:
            return ratio
    raise ConversionError(f"transformers' DINOv2 has no integer mlp_ratio for mlp_dim={config.mlp_dim}.")
