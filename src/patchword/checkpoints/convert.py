"""Writing foreign checkpoints. Every file is read back and compared before it gets its final name."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..config import ViTConfig
from ..core.io import atomic_output, write_json
from ..data.preprocess import HALF, Preprocess
from ..errors import CheckpointError, ConversionError, Note, UnknownArchitectureError
from .checkpoint import Checkpoint, move_prefix_positions
from .detect_format import FAMILIES, read_foreign
from .family import NUM_HEADS_BY_WIDTH, Family, Fields, Tensors, format_flag
from .mapping import to_foreign
from .tensor_files import MODEL_FILES, TENSOR_SUFFIXES, write_tensors

WRITABLE = tuple(dict.fromkeys(f.name for f in FAMILIES if f.writable))
# Fields that do not affect the weights, so a format need not store them.
NOT_STORED = {"pos_embed_resample", "dropout", "drop_path", "patch_dropout", "grad_checkpointing", "window_size"}
# Formats of bare files whose tensors show the number of heads.
HEADS_STORED = ("google", "big_vision", "dinov3")
# Fields for which a format may imply another value: it stores the weights, but outputs differ slightly.
NUMERIC = {"norm_eps", "weight_standardization"}


def write_foreign(out: Path, checkpoint: Checkpoint, name: str, *, overwrite: bool = False) -> list[Note]:
    """Write a model as that family's own code reads it; return notes on what the format cannot store.

    Raises:
        ConversionError: The format does not exist, or cannot store this model.
    """
    if name not in WRITABLE:
        raise ConversionError(f"There is no format {name!r} to write. Supported: patchword, {', '.join(WRITABLE)}.")
    if not isinstance(checkpoint.config, ViTConfig):
        raise ConversionError(f"The {name} format stores Vision Transformers, not ResNets.")
    quirks = checkpoint.quirks if checkpoint.family == name else {}
    check_suffix(out, next(family for family in FAMILIES if family.name == name))
    family = select_family(name, checkpoint.config, quirks)
    checkpoint = replace(checkpoint, config=family.equivalent(checkpoint.config))
    assert isinstance(checkpoint.config, ViTConfig)
    tensors, config = move_prefix_positions(
        checkpoint.tensors, checkpoint.config, family.num_positioned_tokens(checkpoint.config)
    )
    try:
        theirs = to_foreign(tensors, config, family.tensor_map(config), name)
        theirs = family.denormalize(family.join_extras(theirs, checkpoint.extras, config), config, quirks)
        sidecars = family.sidecars(config, checkpoint.labels, preprocess_fields(checkpoint), quirks)
    except KeyError as error:
        raise ConversionError(f"The {name} format cannot store {error}.") from None
    with atomic_output(out, overwrite=overwrite, replaceable=MODEL_FILES) as temporary:
        write_files(temporary, theirs, sidecars, wrapped=family.wraps(quirks))
        return verify_written(temporary, out, family, replace(checkpoint, tensors=tensors, config=config))


def select_family(name: str, config: ViTConfig, quirks: Fields) -> Family:
    """Return the family of this name that can store a model, first the variant that it was read from.

    Raises:
        ConversionError: None of the families of this name can store the model.
    """
    families = [f for f in FAMILIES if f.name == name and f.writable]
    families.sort(key=lambda family: family.variant != quirks.get("variant", ""))
    problems = [family.unsupported(family.equivalent(config)) for family in families]
    for family, unsupported in zip(families, problems, strict=True):
        if not unsupported:
            return family
    # Report the problems of the class that comes nearest: with the same kind of positions, if there is one.
    nearest = min(problems, key=lambda found: (any(p.startswith("pos_embed=") for p in found), len(found)))
    raise ConversionError(f"The {name} format cannot store a model with {', '.join(nearest)}.")


def check_suffix(out: Path, family: Family) -> None:
    """Raise a ConversionError if the name of the output does not fit the format."""
    bare = (".safetensors", ".pth") if family.name == "timm" else ()
    wanted = (family.suffix,) if family.suffix else bare
    if out.suffix in wanted or (not family.suffix and out.suffix not in TENSOR_SUFFIXES):
        return
    place = (
        f"a file named *{family.suffix}" if family.suffix else " or ".join(["a directory", *(f"*{b}" for b in bare)])
    )
    raise ConversionError(f"{out}: the {family.name} format is written to {place}.")


def verify_written(path: Path, out: Path, family: Family, written: Checkpoint) -> list[Note]:
    """Read the written files without further information, and compare the models.

    Raises:
        ConversionError: It is another model.
    """
    config = written.config
    assert isinstance(config, ViTConfig)
    is_bare = path.is_file()
    heads: Fields = {"num_heads": config.num_heads, "head_dim": config.attention_dim} if is_bare else {}
    again, hints, problem = read_with_hints(path, config, heads)
    if again is None:
        reason = str(problem).replace(str(path), out.name)
        raise ConversionError(f"The {family.name} format cannot store this model: {reason}")
    before, after = comparable_fields(config), comparable_fields(again.config)
    changed = [k for k in before if before[k] != after.get(k)]
    wrong = [f"{k}={before[k]!r}" for k in changed if not is_close(k, before[k], after.get(k))]
    ours, theirs = written.tensors, again.tensors
    same = ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())
    if again.family != family.name or wrong or not same:
        raise ConversionError(
            f"The {family.name} format cannot store a model with {', '.join(wrong) or 'these tensors'}."
        )
    texts = [
        f"{family.name} code computes with {k}={after[k] or 'their default'}, this model with {k}={before[k]}: outputs "
        "differ slightly."
        for k in changed
    ]
    notes = [Note(text, "numerics_differ") for text in texts]
    if is_bare:
        return notes + required_flags(family, written, again, [*changed, *hints])
    return notes + unstored_metadata(family, written, again)


def is_close(name: str, before: Any, after: Any) -> bool:
    """Whether outputs differ only slightly with another value of a field."""
    if name == "activation":
        return {before, after} == {"gelu", "gelu_tanh"}
    return name in NUMERIC or (name == "rope_periods" and not after)  # bfloat16 periods, recomputed in float32


def unstored_metadata(family: Family, written: Checkpoint, again: Checkpoint) -> list[Note]:
    """Note the metadata that a directory of that family cannot store."""
    notes = []
    if written.temperature != 1.0:
        value = f"{written.temperature:g}"
        text = f"{family.name} stores no temperature: divide the logits by {value} for calibrated probabilities."
        notes.append(Note(text, "temperature_not_stored"))
    if written.multi_label:
        text = f"{family.name} does not store that the model is multi-label: use sigmoid instead of softmax."
        notes.append(Note(text, "multi_label_not_stored"))
    before, after = written.preprocess, again.preprocess
    if before is not None and after is not None and preprocess_key(before) != preprocess_key(after):
        text = f"{family.name} cannot store the exact preprocessing: {before.summary()}."
        notes.append(Note(text, "preprocess_not_stored"))
    return notes


def preprocess_key(preprocess: Preprocess) -> tuple[Any, ...]:
    """Return the values that decide what the model sees, for comparison."""
    rounded = (tuple(round(v, 6) for v in values) for values in (preprocess.mean, preprocess.std))
    sizes = (preprocess.size, preprocess.resize_size, preprocess.trim)
    return *sizes, preprocess.resize, preprocess.interpolation, *rounded


def read_with_hints(
    path: Path, config: ViTConfig, hints: Fields
) -> tuple[Checkpoint | None, list[str], CheckpointError | None]:
    """Read a checkpoint, given no more of the config than its reader asks for.

    Returns:
        The checkpoint or None, the fields that it was given in addition to `hints`, and the last error.
    """
    added: list[str] = []
    while True:
        again, problem = try_read(path, hints | {name: getattr(config, name) for name in added})
        if isinstance(problem, UnknownArchitectureError) and not set(problem.missing) <= set(added):
            added += [name for name in problem.missing if name not in added]
        elif "image_size" not in added and (again is None or again.config.image_size != config.image_size):
            added.append("image_size")  # perhaps the file does not store it
        else:
            return again, added, problem


def try_read(path: Path, overrides: Fields) -> tuple[Checkpoint | None, CheckpointError | None]:
    """Read a checkpoint; return it or the error."""
    try:
        return read_foreign(path, overrides), None
    except CheckpointError as error:
        return None, error


def required_flags(family: Family, written: Checkpoint, again: Checkpoint, fields: list[str]) -> list[Note]:
    """Note the flags that are needed to read a bare file, because it does not store their values."""
    config = written.config
    assert isinstance(config, ViTConfig)
    if (
        "num_heads" not in fields
        and family.name not in HEADS_STORED
        and NUM_HEADS_BY_WIDTH.get(config.embed_dim) != config.num_heads
    ):
        fields = ["num_heads", *fields]
    flags = [format_flag(name, getattr(config, name)) for name in fields]
    if written.preprocess is not None and again.preprocess is not None:
        default = again.preprocess.to_json()
        stored = written.preprocess.to_json()
        changed = {n: v for n, v in stored.items() if n not in ("size", "trim") and v != default[n]}
        flags += [format_flag(name, value) for name, value in changed.items()]
    if written.labels and written.labels != again.labels:
        flags.append("--labels FILE")
    hint = "; to read it, add " + " ".join(flags) if flags else ""
    text = f"the file does not store labels, preprocessing or temperature{hint}. The patchword format does."
    if written.preprocess is not None and any(written.preprocess.trim):
        text += f" No flag gives its preprocessing exactly: {written.preprocess.summary()}."
    return [Note(text, "metadata_not_stored")]


def comparable_fields(config: Any) -> Fields:
    """Return the fields that affect the weights, with derived values filled in."""
    fields = {k: v for k, v in config.to_json().items() if k not in NOT_STORED}
    fields |= {"head_dim": config.attention_dim, "pos_embed_prefix": config.num_positioned}
    if config.stem != "resnet":
        del fields["weight_standardization"]
    return fields | {"layer_scale": config.layer_scale is not None}


def write_files(path: Path, tensors: Tensors, sidecars: dict[str, Fields], *, wrapped: bool) -> None:
    """Write a tensor file, or a directory with a tensor file and its JSON files."""
    if path.suffix in TENSOR_SUFFIXES:
        write_tensors(path, tensors, wrapped=wrapped)
        return
    path.mkdir()
    write_tensors(path / "model.safetensors", tensors)
    for name, content in sidecars.items():
        write_json(path / name, content)


def preprocess_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the preprocessing; neutral statistics if the inputs are not images."""
    if checkpoint.preprocess is not None:
        return asdict(checkpoint.preprocess)
    count = checkpoint.config.in_channels
    return asdict(Preprocess(size=checkpoint.config.image_size, mean=HALF, std=HALF)) | {
        "mean": (0.0,) * count,
        "std": (1.0,) * count,
    }
