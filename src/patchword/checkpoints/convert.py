"""Our models in every other project's format, proved by reading them back before they get their name."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..config import ViTConfig
from ..core.io import atomic_output, write_json
from ..data.preprocess import HALF, Preprocess
from ..errors import CheckpointError, ConversionError, Note
from .checkpoint import Checkpoint, place_positions
from .detect_format import FAMILIES, read_foreign
from .family import HEADS, Family, Fields, Tensors
from .mapping import to_theirs
from .tensor_files import MODEL_FILES, TENSOR_SUFFIXES, write_tensors

WRITABLE = tuple(f.name for f in FAMILIES if f.writes)
# These are not about the weights; a format need not hold them.
UNSTATED = {"pos_embed_resample", "dropout", "drop_path", "patch_dropout", "grad_checkpointing", "window_size"}
# A format that implies another value for these still holds the weights: the outputs differ a little.
NUMERIC = {"activation", "norm_eps", "weight_standardization"}


def write_foreign(out: Path, checkpoint: Checkpoint, name: str, *, overwrite: bool = False) -> list[Note]:
    """Writes the model as that family's own code reads it; returns what the format cannot state.

    The file is read back and compared before it gets its name, so a format that cannot hold the model is refused.
    """
    family = next((f for f in FAMILIES if f.name == name and f.writes), None)
    if family is None:
        raise ConversionError(f"There is no format {name!r} to write. Known: patchword, {', '.join(WRITABLE)}.")
    if not isinstance(checkpoint.config, ViTConfig):
        raise ConversionError(f"The {name} format holds Vision Transformers, not ResNets.")
    check_suffix(out, family)
    check_needs(checkpoint.config, family)
    tensors, config = place_positions(checkpoint.tensors, checkpoint.config, family.positioned(checkpoint.config))
    quirks = checkpoint.quirks if checkpoint.family == name else {}
    try:
        theirs = to_theirs(tensors, config, family.table(config), name)
        theirs |= {family.unused[n]: t for n, t in checkpoint.extras.items() if n in family.unused}
        theirs = family.restore(theirs, quirks)
        sidecars = family.sidecars(config, checkpoint.labels, preprocess_fields(checkpoint))
    except KeyError as error:
        raise ConversionError(f"The {name} format has no word for {error}.") from None
    with atomic_output(out, overwrite=overwrite, replaceable=MODEL_FILES) as made:
        write(made, theirs, sidecars, wrapped=name == "deit" and not quirks.get("bare"))
        return compare(made, out, family, replace(checkpoint, tensors=tensors, config=config))


def check_needs(config: ViTConfig, family: Family) -> None:
    wrong = [
        f"{name}={getattr(config, name)!r} (only {' or '.join(map(repr, allowed))})"
        for name, allowed in family.needs.items()
        if getattr(config, name) not in allowed
    ]
    if wrong:
        raise ConversionError(f"The {family.name} format cannot hold a model with {', '.join(wrong)}.")


def check_suffix(out: Path, family: Family) -> None:
    bare = (".safetensors", ".pth") if family.name == "timm" else ()
    wanted = (family.suffix,) if family.suffix else bare
    if out.suffix in wanted or (not family.suffix and out.suffix not in TENSOR_SUFFIXES):
        return
    place = f"a file named *{family.suffix}" if family.suffix else " or ".join(["a folder", *(f"*{b}" for b in bare)])
    raise ConversionError(f"{out}: the {family.name} format is written to {place}.")


def compare(made: Path, out: Path, family: Family, written: Checkpoint) -> list[Note]:
    """What was written, read as a stranger would: raises where it is another model, returns what must be told."""
    config = written.config
    assert isinstance(config, ViTConfig)
    bare = made.is_file()
    told: Fields = {"num_heads": config.num_heads, "head_dim": config.attention_dim} if bare else {}
    size: Fields = {"image_size": config.image_size}
    again, problem = try_to_read(made, told)
    unsized = again is None or again.config.image_size != config.image_size
    if unsized:  # perhaps only because the file does not say its image size
        again, problem = try_to_read(made, told | size)
    if again is None:
        reason = str(problem).replace(str(made), out.name)
        raise ConversionError(f"The {family.name} format cannot hold this model: {reason}")
    before, after = comparable(config), comparable(again.config)
    changed = [k for k in before if before[k] != after.get(k)]
    wrong = [f"{k}={before[k]!r}" for k in changed if k not in NUMERIC or before[k] == "swiglu"]
    ours, theirs = written.tensors, again.tensors
    same = ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())
    if again.family != family.name or wrong or not same:
        raise ConversionError(
            f"The {family.name} format cannot hold a model with {', '.join(wrong) or 'these tensors'}."
        )
    texts = [
        f"{family.name} code computes with {k}={after[k]}, this model with {before[k]}: outputs differ a little there."
        for k in changed
    ]
    notes = [Note(text, "numerics_differ") for text in texts]
    if bare:
        return notes + to_be_told(family, written, again, [*changed, *(size if unsized else ())])
    return notes + unsaid(family, written, again)


def unsaid(family: Family, written: Checkpoint, again: Checkpoint) -> list[Note]:
    """What a folder of that family has no place for."""
    notes = []
    if written.temperature != 1.0:
        heat = f"{written.temperature:g}"
        text = f"{family.name} has no temperature: divide the logits by {heat}, or confidences are not calibrated."
        notes.append(Note(text, "temperature_not_stored"))
    if written.multi_label:
        text = f"{family.name} does not store that the model is multi-label: use the sigmoid, not the softmax."
        notes.append(Note(text, "multi_label_not_stored"))
    if written.preprocess is not None and again.preprocess is not None:
        if geometry(again.preprocess) != geometry(written.preprocess):
            text = f"{family.name} cannot state the exact preprocessing: {written.preprocess.summary()}."
            notes.append(Note(text, "preprocess_not_stored"))
    return notes


def geometry(preprocess: Preprocess) -> tuple[Any, ...]:
    rounded = (tuple(round(v, 6) for v in each) for each in (preprocess.mean, preprocess.std))
    return preprocess.size, preprocess.resize, preprocess.resize_size, preprocess.interpolation, *rounded


def try_to_read(path: Path, told: Fields) -> tuple[Checkpoint | None, CheckpointError | None]:
    try:
        return read_foreign(path, told), None
    except CheckpointError as error:
        return None, error


def to_be_told(family: Family, written: Checkpoint, again: Checkpoint, fields: list[str]) -> list[Note]:
    """The words that whoever reads a bare file must add, because it does not hold them."""
    config = written.config
    assert isinstance(config, ViTConfig)
    if family.name not in ("google", "big_vision") and HEADS.get(config.embed_dim) != config.num_heads:
        fields = ["num_heads", *fields]
    flags = [flag(name, getattr(config, name)) for name in fields]
    if written.preprocess is not None and again.preprocess is not None:
        default = again.preprocess.to_json()
        stated = {n: v for n, v in written.preprocess.to_json().items() if v != default[n] and n != "size"}
        flags += [flag(name, value) for name, value in stated.items()]
    if written.labels and written.labels != again.labels:
        flags.append("--labels FILE")
    told = "; whoever reads it must add " + " ".join(flags) if flags else ""
    text = f"the file does not state labels, preprocessing or temperature{told}. The patchword folder does."
    return [Note(text, "metadata_not_stored")]


def flag(name: str, value: Any) -> str:
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"--{name.replace('_', '-')} {words}"


def comparable(config: Any) -> Fields:
    """A config's fields with what follows from others filled in, without what is not about the weights."""
    fields = {k: v for k, v in config.to_json().items() if k not in UNSTATED}
    fields |= {"head_dim": config.attention_dim, "pos_embed_prefix": config.num_positioned}
    if config.stem != "resnet":
        del fields["weight_standardization"]
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
