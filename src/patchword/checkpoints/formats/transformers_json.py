"""transformers' JSON files: labels in config.json, and preprocessor_config.json, both ways."""

from typing import Any

from ...config import ViTConfig
from ...errors import CheckpointError
from ..family import Fields, Source, require_fields, size_to_json, translate_value

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def require_config(source: Source, overrides: Fields, *names: str) -> Fields:
    """Raise an error for a file without config.json, unless the caller gives what it would state.

    Returns:
        The fields that no file states, for `Metadata.assumed`; empty with a config.json.
    """
    if source.config:
        return {}
    place = f"in {source.path}" if source.path.is_dir() else f"beside {source.path.name}"
    reason = f"There is no config.json of transformers {place}, which states how the model computes. Put it there."
    require_fields(overrides, names, reason)
    return dict.fromkeys(names, "the default of the class")


def parse_activation(config: Fields, default: str) -> str:
    """Return the activation; a config.json omits it if it is the default of its class."""
    return translate_value(config.get("hidden_act", default), ACTIVATIONS, "activation")


def check_switches(config: Fields, seen: Fields) -> None:
    """Raise an error for a switch in config.json that contradicts the tensors, which transformers would not use."""
    for name, value in seen.items():
        if name in config and bool(config[name]) != bool(value):
            raise CheckpointError(
                f"config.json has {name}={config[name]}, but the tensors are those of {name}={bool(value)}."
            )


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
    if processor.get("do_normalize") is False:
        fields |= {"mean": [0.0] * 3, "std": [1.0] * 3}
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


def shared_config(config: ViTConfig, labels: tuple[str, ...] | None) -> Fields:
    """Return the fields that the config.json of most models has."""
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    result: Fields = {"hidden_size": config.embed_dim, "num_hidden_layers": config.depth}
    result |= {"num_attention_heads": config.num_heads, "image_size": size_to_json(config.image_size)}
    result |= {"patch_size": size_to_json(config.patch_size), "num_channels": config.in_channels}
    result |= {"hidden_act": acts.get(config.activation, "gelu"), "layer_norm_eps": config.norm_eps}
    return result | label_config(config.num_classes, labels)


def stated_size(preprocess: Fields) -> Fields:
    """Return the image size of config.json if it is not a multiple of the patch; `shared_config` has all others."""
    sides = [own + trimmed for own, trimmed in zip(preprocess["size"], preprocess["trim"], strict=True)]
    return {"image_size": size_to_json((sides[0], sides[1]))} if any(preprocess["trim"]) else {}


def label_config(num_classes: int, labels: tuple[str, ...] | None) -> Fields:
    """Return the labels as config.json has them; a model without a head has none."""
    names = labels or tuple(f"LABEL_{i}" for i in range(num_classes))
    indices = {label: i for i, label in enumerate(names)}
    return {"id2label": {str(i): label for i, label in enumerate(names)}, "label2id": indices}


def transformers_processor(preprocess: Fields) -> Fields:
    """Return the preprocessor_config.json that transformers reads."""
    height, width = (own + rest for own, rest in zip(preprocess["size"], preprocess["trim"], strict=True))
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
