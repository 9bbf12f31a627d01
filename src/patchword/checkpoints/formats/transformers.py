"""transformers directories (`save_pretrained`): ViT, DeiT with one or two heads, DINOv2 with and without registers."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ...errors import ConversionError
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
    size_to_json,
    translate_value,
)
from ..mapping import Patch, Rule, TensorMap

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

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
CLASSES = {
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
}
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


class Transformers(Family):
    """huggingface/transformers."""

    name = "transformers"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class", "class+average"),
        "pos_embed": ("learned",),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers", "norm_eps": 1e-12}
    preprocess: ClassVar[Fields] = {"resize": "squash", "interpolation": "bilinear"}
    passthrough: ClassVar[dict[str, str]] = {"mask_token": "embeddings.mask_token"}

    def matches(self, source: Source) -> bool:
        return any(n.endswith(PROJECTION) for n in source.tensors)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = next((n.removesuffix(PROJECTION) for n in source.tensors if n.endswith(PROJECTION)), "")
        tensors = {n.removeprefix(prefix): t for n, t in source.tensors.items()}
        return tensors, {} if prefix else {"bare": True}

    def denormalize(self, tensors: Tensors, quirks: Fields) -> Tensors:
        kind = infer_model_type(tensors)
        prefix = "" if quirks.get("bare") else f"{kind}."
        heads = ("classifier.", "cls_classifier.", "distillation_classifier.")
        return {n if n.startswith(heads) else prefix + n: t for n, t in tensors.items()}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        json_config = source.config
        kind = json_config.get("model_type") or infer_model_type(tensors)
        translate_value(kind, CLASSES, "model_type")
        width, channels, ph, pw = get_shape(tensors, PROJECTION, 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields |= infer_block_fields(tensors, kind, json_config)
        fields |= infer_token_fields(tensors, kind)
        heads = json_config.get("num_attention_heads")
        fields["num_heads"] = heads if heads else infer_num_heads(width, overrides, source.path.name)
        positions = get_shape(tensors, "embeddings.position_embeddings", 3)[1]
        if "image_size" in json_config:
            overrides = {**overrides, **ViTConfig.cast_fields({"image_size": json_config["image_size"]})}
        fields["image_size"] = infer_image_size(positions - fields["pos_embed_prefix"], (ph, pw), overrides)
        preprocess = {"crop": 0.875, "statistics": "imagenet"} if "dino" in kind else {}
        preprocess |= parse_preprocess(source.processor)
        return Metadata(fields, preprocess=preprocess, labels=parse_labels(json_config.get("id2label")))

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        one_head_deit = config.layer_scale is None and config.num_registers == 1
        return config.class_token + config.distillation + one_head_deit

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        kind = model_type(config)
        trunk = VIT if kind in ("vit", "deit") else DINO_SWIGLU if config.activation == "swiglu" else DINO
        return {**trunk, **(TWO_HEADS if config.distillation else ONE_HEAD)}

    def sidecars(self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> dict[str, Fields]:
        processor = transformers_processor(preprocess)
        return {"config.json": transformers_config(config, labels), "preprocessor_config.json": processor}


def model_type(config: ViTConfig) -> str:
    """Return the model_type for a config."""
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_registers else "dinov2"
    return "deit" if config.distillation or config.num_registers else "vit"


def infer_model_type(tensors: Tensors) -> str:
    """Infer the model_type from tensor names."""
    if "embeddings.register_tokens" in tensors:
        return "dinov2_with_registers"
    if "encoder.layer.0.layer_scale1.lambda1" in tensors:
        return "dinov2"
    return "deit" if "embeddings.distillation_token" in tensors else "vit"


def infer_block_fields(tensors: Tensors, kind: str, json_config: Fields) -> Fields:
    """Infer depth and the fields that the first block shows."""
    fields: Fields = {"depth": count_blocks(tensors, "encoder.layer.", ".")}
    fields["qkv_bias"] = "encoder.layer.0.attention.attention.query.bias" in tensors
    fields["norm_eps"] = json_config.get("layer_norm_eps", 1e-6 if "dino" in kind else 1e-12)
    fields["activation"] = translate_value(json_config.get("hidden_act", "gelu"), ACTIVATIONS, "activation")
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
    fields |= {"distillation": two_heads, "pos_embed_prefix": 1}
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


def parse_labels(id2label: Any) -> tuple[str, ...] | None:
    """Return the labels by index; None for the placeholders LABEL_0, LABEL_1, ..."""
    if not isinstance(id2label, dict) or not id2label:
        return None
    try:
        names = tuple(str(id2label[str(i)]) for i in range(len(id2label)))
    except KeyError:
        return None
    return None if names[0] == "LABEL_0" else names


def parse_preprocess(processor: Fields) -> Fields:
    """Convert preprocessor_config.json to fields of Preprocess."""
    names = {"image_mean": "mean", "image_std": "std"}
    fields: Fields = {
        ours: processor[theirs] for theirs, ours in names.items() if isinstance(processor.get(theirs), list)
    }
    resample = processor.get("resample")
    if isinstance(resample, int) and resample in RESAMPLING:
        fields["interpolation"] = RESAMPLING[resample]
    size, crop = parse_size(processor.get("size")), parse_size(processor.get("crop_size"))
    resize, edge = ("cover", size["shortest_edge"]) if "shortest_edge" in size else ("squash", size.get("height", 0))
    cropped = crop.get("height", 0) if processor.get("do_center_crop") else 0
    if edge >= cropped > 0:
        fields |= {"resize": resize, "crop": cropped / edge}
    elif edge > 0 and resize == "squash":
        fields |= {"resize": resize, "crop": 1.0}
    return fields


def parse_size(size: Any) -> dict[str, int]:
    """Return the integers of a size; a single integer, as in older files, is a square."""
    if isinstance(size, int):
        return {"height": size, "width": size}
    return {k: v for k, v in size.items() if isinstance(v, int)} if isinstance(size, dict) else {}


def transformers_config(config: ViTConfig, labels: tuple[str, ...] | None) -> Fields:
    """Return the config.json that transformers reads."""
    kind = model_type(config)
    name = CLASSES[kind] + ("WithTeacher" if config.distillation else "")
    if not config.num_classes:
        name = name.replace("ForImageClassification", "Model").replace("WithTeacher", "")
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    result: Fields = {"architectures": [name], "model_type": kind, "hidden_size": config.embed_dim}
    result |= {"num_hidden_layers": config.depth, "num_attention_heads": config.num_heads}
    result |= {"image_size": size_to_json(config.image_size), "patch_size": size_to_json(config.patch_size)}
    result |= {"num_channels": config.in_channels, "qkv_bias": config.qkv_bias, "layer_norm_eps": config.norm_eps}
    result |= {"hidden_act": acts.get(config.activation, "gelu"), "hidden_dropout_prob": config.dropout}
    result |= {"attention_probs_dropout_prob": config.attention_dropout}
    if "dino" in kind:
        result |= {"mlp_ratio": dino_mlp_ratio(config), "use_swiglu_ffn": config.activation == "swiglu"}
        result |= {"num_register_tokens": config.num_registers} if config.num_registers else {}
    else:
        result["intermediate_size"] = config.mlp_dim
        if config.pre_logits:
            result |= {"pooler_output_size": config.pre_logits, "pooler_act": "tanh"}
    names = labels or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    result["id2label"] = {str(i): label for i, label in enumerate(names)}
    result["label2id"] = {label: i for i, label in enumerate(names)}
    return result


def dino_mlp_ratio(config: ViTConfig) -> int:
    """Find the integer mlp_ratio for mlp_dim; with SwiGLU the width is two thirds, rounded up to a multiple of 8."""
    for ratio in range(1, 17):
        width = ratio * config.embed_dim
        if (width if config.activation != "swiglu" else (int(width * 2 / 3) + 7) // 8 * 8) == config.mlp_dim:
            return ratio
    raise ConversionError(f"transformers' DINOv2 has no integer mlp_ratio for mlp_dim={config.mlp_dim}.")


def transformers_processor(preprocess: Fields) -> Fields:
    """Return the preprocessor_config.json that transformers reads."""
    height, width = preprocess["size"]
    resample = {name: number for number, name in RESAMPLING.items()}[preprocess["interpolation"]]
    result: Fields = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    result |= {"image_mean": list(preprocess["mean"]), "image_std": list(preprocess["std"]), "resample": resample}
    rows, columns = (int(side / preprocess["crop"] + 1e-6) for side in (height, width))  # as Preprocess.resize_size
    squash, crop = preprocess["resize"] == "squash", {"height": height, "width": width}
    if squash and (rows, columns) == (height, width):
        return {**result, "image_processor_type": "ViTImageProcessor", "size": crop}
    kind = "DeiTImageProcessor" if squash else "BitImageProcessor"
    result |= {"image_processor_type": kind, "do_center_crop": True, "do_convert_rgb": True, "crop_size": crop}
    return {**result, "size": {"height": rows, "width": columns} if squash else {"shortest_edge": min(rows, columns)}}
