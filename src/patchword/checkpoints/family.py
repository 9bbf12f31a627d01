"""Base class of all checkpoint families, and helpers that infer a config from tensor names and shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..config import ViTConfig
from ..errors import CheckpointError, Note, UnknownArchitectureError
from .mapping import TensorMap

Tensors = dict[str, Tensor]
Fields = dict[str, Any]

# Number of heads by width, for formats that do not store it: the published Ti S B L H g G, SO400M, DINOv2's giant,
# and timm's sizes in between.
NUM_HEADS_BY_WIDTH = {
    192: 3,
    384: 6,
    512: 8,
    640: 10,
    768: 12,
    1024: 16,
    1152: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    1664: 16,
}


@dataclass
class Source:
    """The content of a foreign checkpoint: tensors, and the JSON files next to them."""

    path: Path
    tensors: Tensors
    wrapped: bool = False  # whether the file stores {"model": state_dict}
    config: Fields = field(default_factory=dict)  # config.json
    processor: Fields = field(default_factory=dict)  # preprocessor_config.json
    open_clip: Fields = field(default_factory=dict)  # open_clip_config.json
    given: Fields = field(default_factory=dict)  # fields of the config that the caller gave


@dataclass
class Metadata:
    """What a family infers from a source: everything but the weights."""

    fields: Fields  # of ViTConfig
    preprocess: Fields = field(default_factory=dict)  # of Preprocess, without the size
    labels: tuple[str, ...] | None = None
    notes: list[Note] = field(default_factory=list)  # assumptions that were made
    assumed: Fields = field(default_factory=dict)  # those of `fields` that are a default, not in the file: why
    architecture: str | None = None  # the name that the project gives to this architecture
    stated_size: Any = None  # the image size that the file states; perhaps not a multiple of the patch


class Family:
    """The checkpoint format of one project. Subclasses detect it, infer its config and map its tensor names."""

    name: ClassVar[str]
    variant: ClassVar[str] = ""  # tells the families of one name apart
    suffix: ClassVar[str] = ""  # of the file it writes; "" for a directory
    writable: ClassVar[bool] = True
    defaults: ClassVar[Fields] = {}  # config values that the format implies
    preprocess: ClassVar[Fields] = {}  # the project's documented evaluation transform
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {}  # config values that the format can store
    passthrough: ClassVar[
        dict[str, str]
    ] = {}  # tensors not used in inference, preserved by conversion: our name, theirs

    def matches(self, source: Source) -> bool:
        """Whether the tensor names are those of this family."""
        raise NotImplementedError

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        """Return the tensors under the names of the tensor map, and what `denormalize` needs to undo that."""
        return source.tensors, {}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        """Infer the config from tensors and JSON files; `overrides` are fields that the caller gave."""
        raise NotImplementedError

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        """Return the rules that map our tensors to theirs."""
        raise NotImplementedError

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        """The inverse of `normalize`."""
        return tensors

    def split_extras(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Separate the tensors that inference does not use, under our names, from those that it uses."""
        theirs = {theirs: ours for ours, theirs in self.passthrough.items()}
        extras = {theirs[n]: t for n, t in tensors.items() if n in theirs}
        return {n: t for n, t in tensors.items() if n not in theirs}, extras

    def join_extras(self, tensors: Tensors, extras: Tensors, config: ViTConfig) -> Tensors:
        """The inverse of `split_extras`."""
        return {**tensors, **{self.passthrough[n]: t for n, t in extras.items() if n in self.passthrough}}

    def equivalent(self, config: ViTConfig) -> ViTConfig:
        """Return a config of the same function and tensors, in the form that the format has."""
        return config

    def unsupported(self, config: ViTConfig) -> list[str]:
        """List the config values that the format cannot store."""
        return [
            f"{name}={getattr(config, name)!r} (only {' or '.join(map(repr, allowed))})"
            for name, allowed in self.supported.items()
            if getattr(config, name) not in allowed
        ]

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        """Return how many prefix tokens have a position embedding in this format."""
        return int(config.class_token)

    def wraps(self, quirks: Fields) -> bool:
        """Whether the file stores {"model": state_dict}."""
        return False

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        """Return the JSON files to write next to the tensors."""
        return {}


def count_blocks(tensors: Tensors, before: str, after: str) -> int:
    """Count blocks by the parts of tensor names before and after the block index."""
    indices = {n[len(before) :].split(after)[0] for n in tensors if n.startswith(before)}
    return 1 + max((int(i) for i in indices if i.isascii() and i.isdigit() and len(i) < 10), default=-1)


def get_shape(tensors: Tensors, name: str, dims: int) -> tuple[int, ...]:
    """Return the shape of a required tensor; a missing, empty or misshapen one is a CheckpointError."""
    if name not in tensors:
        raise CheckpointError(f"The tensor {name} is missing: the model cannot be read without it.")
    shape = tuple(tensors[name].shape)
    if len(shape) != dims:
        raise CheckpointError(f"The tensor {name} has shape {shape}; it should have {dims} dimensions.")
    if 0 in shape:
        raise CheckpointError(f"The tensor {name} is empty: it has shape {shape}.")
    return shape


def infer_num_heads(width: int, overrides: Fields, where: str) -> int:
    """Return the number of heads, which the shapes of a fused QKV projection do not show."""
    if "num_heads" in overrides:
        return int(overrides["num_heads"])
    if width not in NUM_HEADS_BY_WIDTH:
        example = next(h for h in (width // 64, 8, 6, 4, 3, 2, 1) if h and width % h == 0)
        raise CheckpointError(
            f"{where} does not store the number of attention heads, and width {width} is not a standard one. "
            f"Give num_heads, for example num_heads={example} in Python or --num-heads {example} on the command line."
        )
    return NUM_HEADS_BY_WIDTH[width]


def assumed_heads(width: int) -> Fields:
    """Return the assumption of `infer_num_heads`, for `Metadata.assumed`."""
    return {"num_heads": f"that of models of width {width}"}


# Fields that tensors do not show, with the values to choose from: none that a reader would just copy.
CHOICES = {"num_heads": "N", "activation": "gelu|gelu_tanh|quick_gelu", "norm_eps": "1e-5|1e-6|1e-12"}
CHOICES |= {"res_post_norm": "true|false", "pos_embed": "learned|rotary|learned+rotary", "pool_heads": "N"}
CHOICES |= {"rope": "eva02|pe|axial|dinov3", "rope_reference": "ROWS COLUMNS", "pool_prefix": "true|false"}


def require_fields(given: Fields, names: Sequence[str], reason: str) -> None:
    """Raise an UnknownArchitectureError if the caller did not give fields without which the reading would be a guess.

    Args:
        given: The fields that the caller gave.
        names: The fields that are needed.
        reason: Why they are needed, and what else would help: sentences.
    """
    missing = tuple(name for name in names if name not in given)
    if missing:
        flags = " ".join(format_flag(name, CHOICES[name]) for name in missing)
        raise UnknownArchitectureError(
            f"{reason} If you know how it was built, give {', '.join(missing)}: {flags} (keywords in Python).",
            missing=missing,
        )


def format_flag(name: str, value: Any) -> str:
    """Format a config field as a command-line flag."""
    if isinstance(value, bool):
        value = str(value).lower()
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"--{name.replace('_', '-')} {words}"


def note_if(source: Source, prefixes: tuple[str, ...], note: Note) -> list[Note]:
    """Return the note if the checkpoint has tensors with one of these prefixes."""
    return [note] if any(n.startswith(prefixes) for n in source.tensors) else []


def infer_image_size(count: int, stride: tuple[int, int], overrides: Fields) -> tuple[int, int]:
    """Infer the image size from the number of patch positions: square if possible, else `overrides` must give it."""
    side = math.isqrt(max(0, count))
    if count > 0 and side * side == count:
        return side * stride[0], side * stride[1]
    size = overrides.get("image_size")
    if size and (size[0] // stride[0]) * (size[1] // stride[1]) == count:
        return tuple(size)
    raise CheckpointError(
        f"The file has {count} patch positions, which is not a square, and does not store their grid. Give the "
        "image size it was trained at, for example image_size=(224, 448) in Python or --image-size 224 448."
    )


def size_to_json(size: tuple[int, int]) -> int | list[int]:
    """Format a size as other projects do: one integer if the sides are equal."""
    return size[0] if size[0] == size[1] else list(size)


def translate_value(value: Any, known: dict[str, str], field: str) -> str:
    """Translate a value of config.json into ours; raises a CheckpointError if it is unknown."""
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(f"config.json has the {field} {value!r}; supported: {', '.join(known)}.")
    return known[value]


def infer_prefix_positions(count: int, num_prefix: int) -> int:
    """Infer how many of `count` positions belong to prefix tokens: as many as leave a square grid of patches."""
    for k in range(min(num_prefix, count) + 1):
        if math.isqrt(count - k) ** 2 == count - k > 0:
            return k
    return num_prefix
