"""Every other project's checkpoints: recognised by their tensor names, read into ours."""

from dataclasses import replace
from pathlib import Path

from ..config import ViTConfig
from ..core.io import read_json
from ..data.datasets.imagenet import imagenet_classes
from ..data.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from ..errors import CheckpointError, ConfigError, Note
from ..models import tensor_shapes
from ..models.adapt import ADAPTABLE_FIELDS, WEIGHTLESS_FIELDS
from .checkpoint import Checkpoint
from .family import Metadata, Family, Fields, Source
from .formats.big_vision import BigVision
from .formats.dinov2 import DINOv2
from .formats.facebook_deit import DeiT
from .formats.google import Google
from .formats.timm import Timm
from .formats.torchvision import Torchvision
from .formats.transformers import Transformers
from .formats.vit_pytorch import ViTPytorch
from .mapping import join_names, from_foreign
from .tensor_files import TENSOR_SUFFIXES, read_tensors

# In this order: a later family's names may be part of an earlier one's.
FAMILIES: tuple[Family, ...] = (
    *(Google(), BigVision(), Transformers(), Torchvision(), ViTPytorch()),
    *(DINOv2(), DeiT(), Timm()),
)
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before every name


def read_foreign(path: Path, overrides: Fields) -> Checkpoint:
    """A checkpoint of any family. `given` are model fields the caller states where the file does not."""
    source = load_source(path)
    family = detect_family(source)
    declared = {k: v for k, v in overrides.items() if k not in ADAPTABLE_FIELDS | WEIGHTLESS_FIELDS}
    try:
        tensors, quirks = family.normalize(source)
        extras = {ours: tensors.pop(theirs) for ours, theirs in family.passthrough.items() if theirs in tensors}
        described = family.read_metadata(source, tensors, overrides)
        config = ViTConfig.from_json({**described.fields, **declared})
        state = from_foreign(tensors, config, family.tensor_map(config), family.name, tensor_shapes(config))
        preprocess = resolve_preprocess(family, described, config)
        labels, label_notes = resolve_labels(described, config)
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(f"{source.path} ({family.name}): {error}") from None
    checkpoint = Checkpoint(config, state, preprocess, labels, family=family.name, quirks=quirks, extras=extras)
    checkpoint = checkpoint.adapt(**{k: v for k, v in overrides.items() if k in ADAPTABLE_FIELDS | WEIGHTLESS_FIELDS})
    notes = (*described.notes, *label_notes, *checkpoint.notes)
    if "mean" not in described.preprocess and checkpoint.preprocess is not None:
        text = f"the file does not state its preprocessing; {family.name}'s default: {checkpoint.preprocess.summary()}."
        notes = (Note(text, "preprocess_assumed"), *notes)
    provenance = {"read_from": source.path.name, "family": family.name, "assumed": list(notes)}
    return replace(checkpoint, notes=notes, provenance=provenance)


def load_source(path: Path) -> Source:
    """The tensors of a file, or of a folder with one checkpoint in it, and the JSON files beside them."""
    if path.is_dir():
        folder, files = path, [f for f in sorted(path.iterdir()) if f.suffix in TENSOR_SUFFIXES]
        preferred = [f for f in files if f.name in ("model.safetensors", "pytorch_model.bin")]
        if (path / "model.safetensors.index.json").is_file():
            files = list_shards(path)
        elif len(files) > 1:
            if not preferred:
                raise CheckpointError(
                    f"{path} holds several checkpoints ({join_names([f.name for f in files])}): name one."
                )
            files = preferred[:1]
        if not files:
            raise CheckpointError(f"{path} holds no checkpoint file ({', '.join(TENSOR_SUFFIXES)}).")
    else:
        folder, files = path.parent, [path]
    tensors, wrapped = {}, False
    for file in files:
        more, wrapped = read_tensors(file)
        tensors.update(more)
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): t for name, t in tensors.items()}
    config = read_optional_json(folder / "config.json")
    belongs = "model_type" in config or "architecture" in config  # not just any config.json
    processor = read_optional_json(folder / "preprocessor_config.json")
    return Source(path, tensors, wrapped, config if belongs else {}, processor)


def list_shards(folder: Path) -> list[Path]:
    mapping = read_json(folder / "model.safetensors.index.json").get("weight_map")
    names = list(mapping.values()) if isinstance(mapping, dict) else []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise CheckpointError(f"{folder / 'model.safetensors.index.json'} does not list the files of the model.")
    return [folder / n for n in sorted(set(names))]


def read_optional_json(path: Path) -> Fields:
    return read_json(path) if path.is_file() else {}


def detect_family(source: Source) -> Family:
    for family in FAMILIES:
        if family.matches(source):
            return family
    raise CheckpointError(
        f"{source.path} is of no known family ({', '.join(f.name for f in FAMILIES)}). "
        f"Its tensors: {join_names(sorted(source.tensors), 6)}."
    )


def resolve_preprocess(family: Family, described: Metadata, config: ViTConfig) -> Preprocess | None:
    """What the checkpoint says of its preprocessing, else what the family documents; None if these are no pictures."""
    if config.in_channels not in (1, 3):
        return None
    fields: Fields = {**family.preprocess, **described.preprocess}
    imagenet = fields.pop("statistics", None) == "imagenet"
    fields.setdefault("mean", IMAGENET_MEAN if imagenet else HALF)
    fields.setdefault("std", IMAGENET_STD if imagenet else HALF)
    fields |= Preprocess.cast_fields({name: fields[name] for name in ("mean", "std")})
    for name in ("mean", "std"):
        if fields[name] and len(fields[name]) != config.in_channels:
            fields[name] = (sum(fields[name]) / len(fields[name]),) * config.in_channels
    return Preprocess(size=config.image_size, **fields)


def resolve_labels(described: Metadata, config: ViTConfig) -> tuple[tuple[str, ...] | None, list[Note]]:
    if described.labels is not None:
        if len(described.labels) != config.num_classes:
            raise CheckpointError(f"{len(described.labels)} labels for {config.num_classes} classes.")
        return described.labels, []
    if config.num_classes == 1000:
        text = "1000 classes without names: taken to be ImageNet-1k."
        return tuple(name for _, name in imagenet_classes()), [Note(text, "labels_assumed")]
    return None, []
