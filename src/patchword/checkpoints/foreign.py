"""Every other project's checkpoints: recognised by their tensor names, read into ours, written as they are there."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import ViTConfig
from ..data.imagenet import imagenet_classes
from ..errors import CheckpointError, ConfigError, ConversionError
from ..models import tensor_shapes
from ..models.adapt import ADAPTED, FREE
from ..preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from .big_vision import BigVision
from .checkpoint import Checkpoint, place_positions
from .deit import DeiT
from .dinov2 import DINOv2
from .family import Described, Family, Fields, Source, Tensors
from .files import TENSOR_SUFFIXES, atomic_output, read_json, read_tensors, write_json, write_tensors
from .google import Google
from .rules import listed, to_ours, to_theirs
from .timm import Timm
from .torchvision import Torchvision
from .transformers import Transformers
from .vit_pytorch import ViTPytorch

# In this order: a later family's names may be part of an earlier one's.
FAMILIES: tuple[Family, ...] = (
    *(Google(), BigVision(), Transformers(), Torchvision(), ViTPytorch()),
    *(DINOv2(), DeiT(), Timm()),
)
WRITABLE = tuple(f.name for f in FAMILIES if f.writes)
# These are not about the weights; a format need not hold them.
UNSTATED = {"position_resample", "dropout", "drop_path", "patch_dropout", "checkpoint_blocks", "window"}
# A format that implies another value for these still holds the weights: the outputs differ a little.
NUMERIC = {"activation", "norm_eps", "standardisation"}


def read_foreign(path: Path, given: Fields) -> Checkpoint:
    """A checkpoint of any family. `given` are model fields the caller states where the file does not."""
    source = find_source(path)
    family = recognise(source)
    declared = {k: v for k, v in given.items() if k not in ADAPTED | FREE}
    try:
        tensors, quirks = family.normalise(source)
        extras = {ours: tensors.pop(theirs) for ours, theirs in family.unused.items() if theirs in tensors}
        described = family.describe(source, tensors, given)
        config = ViTConfig.from_json({**described.fields, **declared})
        state = to_ours(tensors, config, family.table(config), family.name, tensor_shapes(config))
        preprocess, preprocess_notes = make_preprocess(family, described, config)
        labels, label_notes = make_labels(described, config)
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(f"{source.path} ({family.name}): {error}") from None
    notes = (*described.notes, *preprocess_notes, *label_notes)
    checkpoint = Checkpoint(config, state, preprocess, labels, family=family.name, quirks=quirks, extras=extras)
    changes = {k: v for k, v in given.items() if k in ADAPTED | FREE}
    provenance = {"read_from": source.path.name, "family": family.name, "assumed": list(notes)}
    return Checkpoint(**{**vars(checkpoint.adapted(**changes)), "notes": notes, "provenance": provenance})


def find_source(path: Path) -> Source:
    """The tensors of a file, or of a folder with one checkpoint in it, and the JSON files beside them."""
    if path.is_dir():
        folder, files = path, [f for f in sorted(path.iterdir()) if f.suffix in TENSOR_SUFFIXES]
        preferred = [f for f in files if f.name in ("model.safetensors", "pytorch_model.bin")]
        if (path / "model.safetensors.index.json").is_file():
            files = shards(path)
        elif len(files) > 1:
            if not preferred:
                raise CheckpointError(
                    f"{path} holds several checkpoints ({listed([f.name for f in files])}): name one."
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
    config = optional_json(folder / "config.json")
    belongs = "model_type" in config or "architecture" in config  # not just any config.json
    processor = optional_json(folder / "preprocessor_config.json")
    return Source(path, tensors, wrapped, config if belongs else {}, processor)


def shards(folder: Path) -> list[Path]:
    mapping = read_json(folder / "model.safetensors.index.json").get("weight_map")
    names = list(mapping.values()) if isinstance(mapping, dict) else []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise CheckpointError(f"{folder / 'model.safetensors.index.json'} does not list the files of the model.")
    return [folder / n for n in sorted(set(names))]


def optional_json(path: Path) -> Fields:
    return read_json(path) if path.is_file() else {}


def recognise(source: Source) -> Family:
    for family in FAMILIES:
        if family.recognises(source):
            return family
    raise CheckpointError(
        f"{source.path} is of no known family ({', '.join(f.name for f in FAMILIES)}). "
        f"Its tensors: {listed(sorted(source.tensors), 6)}."
    )


def make_preprocess(family: Family, described: Described, config: ViTConfig) -> tuple[Preprocess | None, list[str]]:
    """What the checkpoint says of its preprocessing, else what the family documents."""
    if config.in_channels not in (1, 3):
        return None, [f"{config.in_channels} channels: these are no pictures, so there is no preprocessing."]
    fields: Fields = {**family.preprocess, **described.preprocess}
    imagenet = fields.pop("statistics", None) == "imagenet"
    fields.setdefault("mean", IMAGENET_MEAN if imagenet else HALF)
    fields.setdefault("std", IMAGENET_STD if imagenet else HALF)
    fields |= Preprocess.cast_fields({name: fields[name] for name in ("mean", "std")})
    for name in ("mean", "std"):
        if fields[name] and len(fields[name]) != config.in_channels:
            fields[name] = (sum(fields[name]) / len(fields[name]),) * config.in_channels
    preprocess = Preprocess(size=config.image_size, **fields)
    if "mean" in described.preprocess:
        return preprocess, []
    return preprocess, [
        f"the file does not say how images are prepared; {family.name}'s default: {summary(preprocess)}."
    ]


def summary(preprocess: Preprocess) -> str:
    scale = (
        "squash" if preprocess.resize == "squash" else f"resize {preprocess.resized_to[0]}, crop {preprocess.size[0]}"
    )
    return f"{scale}, {preprocess.interpolation}, mean {preprocess.mean}, std {preprocess.std}"


def make_labels(described: Described, config: ViTConfig) -> tuple[tuple[str, ...] | None, list[str]]:
    if described.labels is not None:
        if len(described.labels) != config.num_classes:
            raise CheckpointError(f"{len(described.labels)} labels for {config.num_classes} classes.")
        return described.labels, []
    if config.num_classes == 1000:
        return tuple(name for _, name in imagenet_classes()), ["1000 classes without names: taken to be ImageNet-1k."]
    return None, []


def write_foreign(out: Path, checkpoint: Checkpoint, name: str, *, overwrite: bool = False) -> list[str]:
    """Writes the model as that family's own code reads it; returns what the format cannot state.

    The file is read back and compared before it gets its name, so a format that cannot hold the model is refused.
    """
    family = next((f for f in FAMILIES if f.name == name and f.writes), None)
    if family is None:
        raise ConversionError(f"There is no format {name!r} to write. Known: patchword, {', '.join(WRITABLE)}.")
    if not isinstance(checkpoint.config, ViTConfig):
        raise ConversionError(f"The {name} format holds Vision Transformers, not ResNets.")
    check_suffix(out, family)
    tensors, config = place_positions(checkpoint.tensors, checkpoint.config, family.positioned(checkpoint.config))
    quirks = checkpoint.quirks if checkpoint.family == name else {}
    try:
        theirs = to_theirs(tensors, config, family.table(config), name)
        theirs |= {family.unused[n]: t for n, t in checkpoint.extras.items() if n in family.unused}
        theirs = family.restore(theirs, quirks)
        sidecars = family.sidecars(config, checkpoint.labels, preprocess_fields(checkpoint))
    except KeyError as error:
        raise ConversionError(f"The {name} format has no word for {error}.") from None
    with atomic_output(out, overwrite=overwrite) as made:
        write(made, theirs, sidecars, wrapped=name == "deit" and not quirks.get("bare"))
        return compare(made, name, tensors, config)


def check_suffix(out: Path, family: Family) -> None:
    wanted = (family.suffix,) if family.suffix else (".safetensors", ".pth")
    if out.suffix in wanted or (not family.suffix and out.suffix not in TENSOR_SUFFIXES):
        return
    place = f"a file named *{family.suffix}" if family.suffix else "a folder, or a file named *.safetensors or *.pth"
    raise ConversionError(f"{out}: the {family.name} format is written to {place}.")


def compare(made: Path, name: str, tensors: Tensors, config: ViTConfig) -> list[str]:
    """What was written, read as a stranger would: raises where it is another model, returns what must be told."""
    bare = made.is_file()
    told = {"num_heads": config.num_heads, "head_dim": config.attention_dim} if bare else {}
    try:
        again = read_foreign(made, {**told, "image_size": config.image_size})
    except CheckpointError as error:
        raise ConversionError(f"The {name} format cannot hold this model: {error}") from None
    before, after = comparable(config), comparable(again.config)
    changed = [k for k in before if before[k] != after.get(k)]
    wrong = [f"{k}={before[k]!r}" for k in changed if k not in NUMERIC or before[k] == "swiglu"]
    same = tensors.keys() == again.tensors.keys() and all(torch.equal(t, again.tensors[n]) for n, t in tensors.items())
    if again.family != name or wrong or not same:
        raise ConversionError(f"The {name} format cannot hold a model with {', '.join(wrong) or 'these tensors'}.")
    notes = [
        f"{name} code computes with {k}={after[k]}, this model with {before[k]}: outputs differ a little there."
        for k in changed
    ]
    if bare:
        notes.append("labels and preprocessing are not part of the file; keep the patchword folder for them.")
        if name not in ("google", "big_vision"):
            notes.append(f"the number of heads is not part of the file: {config.num_heads}.")
    return notes


def comparable(config: Any) -> Fields:
    """A config's fields with what follows from others filled in, without what is not about the weights."""
    fields = {k: v for k, v in config.to_json().items() if k not in UNSTATED}
    fields |= {"head_dim": config.attention_dim, "position_prefix": config.num_positioned}
    if config.stem != "resnet":
        del fields["standardisation"]
    return fields | {"layer_scale": config.layer_scale is not None}


def write(made: Path, tensors: Tensors, sidecars: dict[str, Fields], *, wrapped: bool) -> None:
    if made.suffix in TENSOR_SUFFIXES:
        write_tensors(made, tensors, wrapped=wrapped)
        return
    made.mkdir()
    write_tensors(made / "model.safetensors", tensors)
    for name, content in sidecars.items():
        write_json(made / name, content)


def preprocess_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.preprocess is not None:
        return asdict(checkpoint.preprocess)
    count = checkpoint.config.in_channels  # not pictures: neutral statistics
    return asdict(Preprocess(size=checkpoint.config.image_size, mean=HALF, std=HALF)) | {
        "mean": (0.0,) * count,
        "std": (1.0,) * count,
    }
