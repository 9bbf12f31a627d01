"""transformers folders (`save_pretrained`): ViT, DeiT with one or two heads, DINOv2 with and without registers."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ...errors import ConversionError
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
    shape_of,
    size_value,
)
from ..mapping import Patch, Rule, Table

PROJECTION = "embeddings.patch_embeddings.projection.weight"
LAYER = "encoder.layer.{}"
SHARED: Table = {
    "class_token": Rule("embeddings.cls_token"),
    "distillation_token": Rule("embeddings.distillation_token"),
    "positions.table": Rule("embeddings.position_embeddings"),
    "patch_embed.proj": Patch("embeddings.patch_embeddings.projection"),
    "blocks.{}.attention.qkv": Rule(LAYER + ".attention.attention", (".query", ".key", ".value")),
    "blocks.{}.attention.out": Rule(LAYER + ".attention.output.dense"),
    "norm": Rule("layernorm"),
}
VIT: Table = {
    **SHARED,
    "registers": Rule("embeddings.distillation_token"),  # a DeiT with one head: its second token is a register
    "blocks.{}.norm1": Rule(LAYER + ".layernorm_before"),
    "blocks.{}.norm2": Rule(LAYER + ".layernorm_after"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".intermediate.dense"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".output.dense"),
    "pre_logits": Rule("pooler.dense"),
}
DINO: Table = {
    **SHARED,
    "registers": Rule("embeddings.register_tokens"),
    "blocks.{}.norm1": Rule(LAYER + ".norm1"),
    "blocks.{}.add1.gamma": Rule(LAYER + ".layer_scale1.lambda1"),
    "blocks.{}.norm2": Rule(LAYER + ".norm2"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.fc1"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.fc2"),
    "blocks.{}.add2.gamma": Rule(LAYER + ".layer_scale2.lambda1"),
}
DINO_SWIGLU: Table = {
    **DINO,
    "blocks.{}.mlp.fc1": Rule(LAYER + ".mlp.weights_in"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".mlp.weights_out"),
}
HEADS: Table = {"head": Rule("classifier")}
TWO_HEADS: Table = {"head": Rule("cls_classifier"), "head_distilled": Rule("distillation_classifier")}

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
CLASSES = {
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
}
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


class Transformers(Family):
    name = "transformers"
    needs: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class", "class+average"),
        "pos_embed": ("learned",),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers", "norm_eps": 1e-12}
    preprocess: ClassVar[Fields] = {"resize": "squash", "interpolation": "bilinear"}
    unused: ClassVar[dict[str, str]] = {"mask_token": "embeddings.mask_token"}

    def recognises(self, source: Source) -> bool:
        return any(n.endswith(PROJECTION) for n in source.tensors)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = next((n.removesuffix(PROJECTION) for n in source.tensors if n.endswith(PROJECTION)), "")
        tensors = {n.removeprefix(prefix): t for n, t in source.tensors.items()}
        return tensors, {} if prefix else {"bare": True}

    def restore(self, tensors: Tensors, quirks: Fields) -> Tensors:
        kind = guess_type(tensors)
        prefix = "" if quirks.get("bare") else f"{kind}."
        heads = ("classifier.", "cls_classifier.", "distillation_classifier.")
        return {n if n.startswith(heads) else prefix + n: t for n, t in tensors.items()}

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        stated = source.config
        kind = stated.get("model_type") or guess_type(tensors)
        known_word(kind, CLASSES, "model_type")
        width, channels, ph, pw = shape_of(tensors, PROJECTION, 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields |= block_fields(tensors, kind, stated)
        fields |= token_fields(tensors, kind)
        heads = stated.get("num_attention_heads")
        fields["num_heads"] = heads if heads else guess_heads(width, given, source.path.name)
        positions = shape_of(tensors, "embeddings.position_embeddings", 3)[1]
        if "image_size" in stated:
            given = {**given, **ViTConfig.cast_fields({"image_size": stated["image_size"]})}
        fields["image_size"] = image_size_for(positions - fields["pos_embed_prefix"], (ph, pw), given)
        preprocess = {"crop": 0.875, "statistics": "imagenet"} if "dino" in kind else {}
        preprocess |= stated_preprocess(source.processor)
        return Described(fields, preprocess=preprocess, labels=stated_labels(stated.get("id2label")))

    def positioned(self, config: ViTConfig) -> int:
        one_head_deit = config.layer_scale is None and config.num_registers == 1
        return config.class_token + config.distillation + one_head_deit

    def table(self, config: ViTConfig) -> Table:
        kind = model_type(config)
        trunk = VIT if kind in ("vit", "deit") else DINO_SWIGLU if config.activation == "swiglu" else DINO
        return {**trunk, **(TWO_HEADS if config.distillation else HEADS)}

    def sidecars(self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> dict[str, Fields]:
        processor = transformers_processor(preprocess)
        return {"config.json": transformers_config(config, labels), "preprocessor_config.json": processor}


def model_type(config: ViTConfig) -> str:
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_registers else "dinov2"
    return "deit" if config.distillation or config.num_registers else "vit"


def guess_type(tensors: Tensors) -> str:
    if "embeddings.register_tokens" in tensors:
        return "dinov2_with_registers"
    if "encoder.layer.0.layer_scale1.lambda1" in tensors:
        return "dinov2"
    return "deit" if "embeddings.distillation_token" in tensors else "vit"


def block_fields(tensors: Tensors, kind: str, stated: Fields) -> Fields:
    fields: Fields = {"depth": count_blocks(tensors, "encoder.layer.", ".")}
    fields["qkv_bias"] = "encoder.layer.0.attention.attention.query.bias" in tensors
    fields["norm_eps"] = stated.get("layer_norm_eps", 1e-6 if "dino" in kind else 1e-12)
    fields["activation"] = known_word(stated.get("hidden_act", "gelu"), ACTIVATIONS, "activation")
    if "encoder.layer.0.layer_scale1.lambda1" in tensors:
        fields["layer_scale"] = 1.0
    for name in ("mlp.weights_out", "mlp.fc2", "output.dense"):
        if f"encoder.layer.0.{name}.weight" in tensors:
            fields["mlp_dim"] = shape_of(tensors, f"encoder.layer.0.{name}.weight", 2)[1]
            if name == "mlp.weights_out":
                fields["activation"] = "swiglu"
            break
    return fields


def token_fields(tensors: Tensors, kind: str) -> Fields:
    """Prefix tokens, pooling and heads."""
    two_heads = "distillation_classifier.weight" in tensors
    head = "cls_classifier.weight" if two_heads else "classifier.weight"
    fields: Fields = {"num_classes": shape_of(tensors, head, 2)[0] if head in tensors else 0}
    fields |= {"distillation": two_heads, "pos_embed_prefix": 1}
    if "embeddings.distillation_token" in tensors:
        fields["pos_embed_prefix"] = 2
        fields["num_registers"] = 0 if two_heads else 1
    if "embeddings.register_tokens" in tensors:
        fields["num_registers"] = shape_of(tensors, "embeddings.register_tokens", 3)[1]
        fields["pos_embed_resample"] = "timm"  # antialiased bicubic
    if "dino" in kind and fields["num_classes"]:
        fields["pooling"] = "class+average"
    if "pooler.dense.weight" in tensors and not fields["num_classes"]:  # its classifiers skip the pooler
        fields["pre_logits"] = shape_of(tensors, "pooler.dense.weight", 2)[0]
    return fields


def stated_labels(id2label: Any) -> tuple[str, ...] | None:
    """Labels by index; transformers' placeholders (LABEL_0 ...) are none."""
    if not isinstance(id2label, dict) or not id2label:
        return None
    try:
        names = tuple(str(id2label[str(i)]) for i in range(len(id2label)))
    except KeyError:
        return None
    return None if names[0] == "LABEL_0" else names


def stated_preprocess(processor: Fields) -> Fields:
    """preprocessor_config.json as fields of ours."""
    names = {"image_mean": "mean", "image_std": "std"}
    fields: Fields = {
        ours: processor[theirs] for theirs, ours in names.items() if isinstance(processor.get(theirs), list)
    }
    resample = processor.get("resample")
    if isinstance(resample, int) and resample in RESAMPLING:
        fields["interpolation"] = RESAMPLING[resample]
    size, crop = sides(processor.get("size")), sides(processor.get("crop_size"))
    resize, edge = ("cover", size["shortest_edge"]) if "shortest_edge" in size else ("squash", size.get("height", 0))
    kept = crop.get("height", 0) if processor.get("do_center_crop") else 0
    if edge >= kept > 0:
        fields |= {"resize": resize, "crop": kept / edge}
    elif edge > 0 and resize == "squash":
        fields |= {"resize": resize, "crop": 1.0}
    return fields


def sides(stated: Any) -> dict[str, int]:
    """The whole numbers of a size; a single number, as older files have it, is both sides of a square."""
    if isinstance(stated, int):
        return {"height": stated, "width": stated}
    return {k: v for k, v in stated.items() if isinstance(v, int)} if isinstance(stated, dict) else {}


def transformers_config(config: ViTConfig, labels: tuple[str, ...] | None) -> Fields:
    """config.json as transformers reads it back."""
    kind = model_type(config)
    name = CLASSES[kind] + ("WithTeacher" if config.distillation else "")
    if not config.num_classes:
        name = name.replace("ForImageClassification", "Model").replace("WithTeacher", "")
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    result: Fields = {"architectures": [name], "model_type": kind, "hidden_size": config.embed_dim}
    result |= {"num_hidden_layers": config.depth, "num_attention_heads": config.num_heads}
    result |= {"image_size": size_value(config.image_size), "patch_size": size_value(config.patch_size)}
    result |= {"num_channels": config.in_channels, "qkv_bias": config.qkv_bias, "layer_norm_eps": config.norm_eps}
    result |= {"hidden_act": acts.get(config.activation, "gelu"), "hidden_dropout_prob": config.dropout}
    if "dino" in kind:
        result |= {"mlp_ratio": dino_ratio(config), "use_swiglu_ffn": config.activation == "swiglu"}
        result |= {"num_register_tokens": config.num_registers} if config.num_registers else {}
    else:
        result["intermediate_size"] = config.mlp_dim
        if config.pre_logits:
            result |= {"pooler_output_size": config.pre_logits, "pooler_act": "tanh"}
    names = labels or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    result["id2label"] = {str(i): label for i, label in enumerate(names)}
    result["label2id"] = {label: i for i, label in enumerate(names)}
    return result


def dino_ratio(config: ViTConfig) -> int:
    """Transformers derives the MLP's width from a whole ratio; a SwiGLU has two thirds, rounded up to eights."""
    for ratio in range(1, 17):
        width = ratio * config.embed_dim
        if (width if config.activation != "swiglu" else (int(width * 2 / 3) + 7) // 8 * 8) == config.mlp_dim:
            return ratio
    raise ConversionError(f"transformers' DINOv2 has no whole mlp_ratio for mlp_dim={config.mlp_dim}.")


def transformers_processor(preprocess: Fields) -> Fields:
    """preprocessor_config.json as transformers reads it back."""
    height, width = preprocess["size"]
    resample = {name: number for number, name in RESAMPLING.items()}[preprocess["interpolation"]]
    result: Fields = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    result |= {"image_mean": list(preprocess["mean"]), "image_std": list(preprocess["std"]), "resample": resample}
    rows, columns = (int(side / preprocess["crop"] + 1e-6) for side in (height, width))  # as Preprocess.resized_to
    squash, crop = preprocess["resize"] == "squash", {"height": height, "width": width}
    if squash and (rows, columns) == (height, width):
        return {**result, "image_processor_type": "ViTImageProcessor", "size": crop}
    kind = "DeiTImageProcessor" if squash else "BitImageProcessor"
    result |= {"image_processor_type": kind, "do_center_crop": True, "do_convert_rgb": True, "crop_size": crop}
    return {**result, "size": {"height": rows, "width": columns} if squash else {"shortest_edge": min(rows, columns)}}
