"""Reading foreign checkpoints: the family is detected by tensor names, then converted to ours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import ViTConfig
from ..core.io import read_json
from ..data.datasets.imagenet import imagenet_classes
from ..data.preprocess import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from ..errors import CheckpointError, ConfigError, Note
from ..models import tensor_shapes
from ..models.adapt import ADAPTABLE_FIELDS, WEIGHTLESS_FIELDS
from .checkpoint import Checkpoint
from .family import Family, Fields, Metadata, Source
from .formats.big_vision import BigVision
from .formats.dinov2 import DINOv2
from .formats.dinov3 import DINOv3
from .formats.facebook_deit import DeiT
from .formats.google import Google
from .formats.mae import MAE
from .formats.open_clip import OpenCLIP, OpenCLIPTimm
from .formats.timm import Timm
from .formats.torchvision import Torchvision
from .formats.transformers import Transformers
from .formats.transformers_aimv2 import TransformersAIMv2
from .formats.transformers_beit import TransformersBEiT
from .formats.transformers_clip import TransformersCLIP
from .formats.transformers_dinov3 import TransformersDINOv3
from .formats.vit_pytorch import ViTPytorch
from .mapping import from_foreign, in_file, join_names
from .tensor_files import TENSOR_SUFFIXES, read_tensors

# The order matters: some names of an earlier family are also those of a later one.
FAMILIES: tuple[Family, ...] = (
    *(Google(), BigVision(), Torchvision(), ViTPytorch(), OpenCLIPTimm(), OpenCLIP()),
    *(TransformersBEiT(), TransformersDINOv3(), TransformersAIMv2(), TransformersCLIP(), Transformers()),
    *(DINOv3(), MAE(), DINOv2(), DeiT(), Timm()),
)
STATISTICS = {"half": (HALF, HALF), "imagenet": (IMAGENET_MEAN, IMAGENET_STD), "clip": (CLIP_MEAN, CLIP_STD)}
MAIN_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DistributedDataParallel and torch.compile


def read_foreign(path: Path, overrides: Fields) -> Checkpoint:
    """Read a checkpoint of any family. `overrides` are config fields that the file does not store, or that adapt it."""
    source = replace(load_source(path), given=overrides)
    family = detect_family(source)
    adaptations = {k: v for k, v in overrides.items() if k in ADAPTABLE_FIELDS | WEIGHTLESS_FIELDS}
    stored_fields = {k: v for k, v in overrides.items() if k not in adaptations}
    try:
        tensors, quirks = family.normalize(source)
        tensors, extras = family.split_extras(tensors)
        metadata = family.read_metadata(source, tensors, overrides)
        quirks |= {"variant": family.variant} if family.variant else {}
        check_given_heads(metadata.fields, stored_fields)
        config = ViTConfig.from_json({**metadata.fields, **stored_fields})
        state = from_foreign(tensors, config, family.tensor_map(config), family.name, tensor_shapes(config))
        preprocess = resolve_preprocess(family, metadata, config)
        labels, label_notes = resolve_labels(metadata, config)
        if metadata.stated_size is not None and not fits_grid(metadata.stated_size, config):
            size = "x".join(map(str, config.image_size))
            text = f"the file states image_size={metadata.stated_size}, but its positions are those of {size} pixels."
            metadata.notes.append(Note(f"{text} These are used.", "image_size_of_positions"))
    except (ConfigError, CheckpointError) as error:
        raise in_file(f"{source.path} ({family.name})", error) from None
    checkpoint = Checkpoint(config, state, preprocess, labels, family=family.name, quirks=quirks, extras=extras)
    checkpoint = checkpoint.adapt(**adaptations)
    notes = (*metadata.notes, *architecture_notes(metadata, stored_fields), *label_notes, *checkpoint.notes)
    if "mean" not in metadata.preprocess and checkpoint.preprocess is not None:
        owner = family.name + ("'" if family.name.endswith("s") else "'s")
        default = f"{owner} default: {checkpoint.preprocess.summary()}"
        text = f"the file does not store its preprocessing; assumed {default}."
        notes = (Note(text, "preprocess_assumed"), *notes)
    provenance = {"read_from": source.path.name, "family": family.name, "assumed": list(notes)}
    provenance |= {"architecture": metadata.architecture} if metadata.architecture else {}
    return replace(checkpoint, notes=notes, provenance=provenance)


def check_given_heads(fields: Fields, given: Fields) -> None:
    """Raise a CheckpointError for a number of heads that the caller gave, if it does not divide the width."""
    heads, width = ViTConfig.cast_fields({"num_heads": given.get("num_heads", 1)})["num_heads"], fields["embed_dim"]
    if heads > 0 and width % heads and given.get("head_dim", fields.get("head_dim")) is None:
        stored = fields.get("num_heads")
        hint = f" (the file says {stored})" if stored and stored != heads else ""
        raise CheckpointError(
            f"num_heads={heads} does not divide the width {width} of the model: correct --num-heads{hint}, or give the "
            "width of a head, too: --head-dim N (num_heads and head_dim in Python)."
        )


def architecture_notes(metadata: Metadata, given: Fields) -> list[Note]:
    """Note the fields that are a default of the format, and those that the caller gave against the file."""
    notes = []
    assumed = {name: why for name, why in metadata.assumed.items() if name not in given}
    if assumed:
        values = join_names([f"{name}={metadata.fields[name]} ({why})" for name, why in assumed.items()])
        notes.append(Note(f"the file does not store its whole architecture; assumed {values}.", "architecture_assumed"))
    for name, value in ViTConfig.cast_fields(given).items():
        if name not in metadata.assumed:
            stored = ViTConfig.cast_fields({name: metadata.fields.get(name, getattr(ViTConfig, name))})[name]
            if stored != value:
                text = f"{name}={value} was given, although the file says {stored}."
                notes.append(Note(text, "field_overridden"))
    return notes


def load_source(path: Path) -> Source:
    """Read the tensors of a file, or of a directory with one checkpoint, and the JSON files next to them."""
    folder, files = (path, select_files(path)) if path.is_dir() else (path.parent, [path])
    tensors, wrapped = {}, False
    for file in files:
        file_tensors, wrapped = read_tensors(file)
        tensors.update(file_tensors)
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): t for name, t in tensors.items()}
    config = read_optional_json(folder / "config.json")
    is_model_config = "model_type" in config or "architecture" in config  # config.json may belong to something else
    processor = read_optional_json(folder / "preprocessor_config.json")
    open_clip = read_optional_json(folder / "open_clip_config.json")
    return Source(path, tensors, wrapped, config if is_model_config else {}, processor, open_clip)


def select_files(folder: Path) -> list[Path]:
    """Select the files of the only checkpoint in a directory, or of its main one."""
    if (folder / "model.safetensors.index.json").is_file():
        return list_shards(folder)
    files = [file for file in sorted(folder.iterdir()) if file.suffix in TENSOR_SUFFIXES]
    if not files:
        raise CheckpointError(f"{folder} contains no checkpoint file ({', '.join(TENSOR_SUFFIXES)}).")
    if len(files) == 1:
        return files
    names = [file.name for file in files]
    preferred = [folder / name for name in MAIN_FILES if name in names]
    if not preferred:
        raise CheckpointError(
            f"{folder} contains several checkpoints ({join_names(names)}). Give the path of one of them."
        )
    return preferred[:1]


def list_shards(folder: Path) -> list[Path]:
    """List the files of a sharded checkpoint; names must not leave the directory."""
    mapping = read_json(folder / "model.safetensors.index.json").get("weight_map")
    names = list(mapping.values()) if isinstance(mapping, dict) else []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise CheckpointError(f"{folder / 'model.safetensors.index.json'} does not list the files of the model.")
    return [folder / n for n in sorted(set(names))]


def read_optional_json(path: Path) -> Fields:
    """Read a JSON object; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def detect_family(source: Source) -> Family:
    """Return the first family whose tensor names match."""
    for family in FAMILIES:
        if family.matches(source):
            return family
    kind = source.config.get("model_type") or source.config.get("architecture")
    text = f"{source.path}{f' ({kind})' if kind else ''} does not match any supported format"
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    raise CheckpointError(f"{text} ({names}). Its tensors: {join_names(sorted(source.tensors), 6)}.")


def resolve_preprocess(family: Family, metadata: Metadata, config: ViTConfig) -> Preprocess | None:
    """Return the stored preprocessing, else the family's default; None if the inputs are not images."""
    if config.in_channels not in (1, 3):
        return None
    fields: Fields = {**family.preprocess, **metadata.preprocess, "trim": find_trim(metadata.stated_size, config)}
    mean, std = STATISTICS[fields.pop("statistics", "half")]
    fields.setdefault("mean", mean)
    fields.setdefault("std", std)
    fields |= Preprocess.cast_fields({name: fields[name] for name in ("mean", "std")})
    for name in ("mean", "std"):
        if fields[name] and len(fields[name]) != config.in_channels:
            fields[name] = (sum(fields[name]) / len(fields[name]),) * config.in_channels
    return Preprocess(size=config.image_size, **fields)


def find_trim(stated: Any, config: ViTConfig) -> tuple[int, int]:
    """Return the pixels of a stated image size that are less than a patch, which the patch projection never sees."""
    if stated is None or not fits_grid(stated, config):
        return 0, 0
    height, width = ViTConfig.cast_fields({"image_size": stated})["image_size"]
    return height - config.image_size[0], width - config.image_size[1]


def fits_grid(stated: Any, config: ViTConfig) -> bool:
    """Whether a stated image size has the patches of the model, and perhaps a rest that is less than a patch."""
    sides = ViTConfig.cast_fields({"image_size": stated})["image_size"]
    return all(
        0 <= side - own < patch for side, own, patch in zip(sides, config.image_size, config.stride, strict=True)
    )


def resolve_labels(metadata: Metadata, config: ViTConfig) -> tuple[tuple[str, ...] | None, list[Note]]:
    """Return the stored labels; 1000 classes without labels are assumed to be ImageNet-1k."""
    if metadata.labels is not None and config.num_classes:
        if len(metadata.labels) != config.num_classes:
            raise CheckpointError(f"{len(metadata.labels)} labels for {config.num_classes} classes.")
        return metadata.labels, []
    if config.num_classes == 1000:
        text = "1000 classes without labels are assumed to be ImageNet-1k."
        return tuple(name for _, name in imagenet_classes()), [Note(text, "labels_assumed")]
    return None, []
