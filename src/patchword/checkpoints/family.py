"""What every family of checkpoints has in common: what it is told (Source), what it says (Described), what it does."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..config import ViTConfig
from ..errors import CheckpointError, Note
from .mapping import Table

Tensors = dict[str, Tensor]
Fields = dict[str, Any]

# Heads by width, for formats that do not say: the published Ti S B L H g G, SO400M, DINOv2's giant, timm's in-betweens.
HEADS = {192: 3, 384: 6, 512: 8, 640: 10, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}


@dataclass
class Source:
    """A foreign checkpoint as it was found."""

    path: Path
    tensors: Tensors
    wrapped: bool = False
    config: Fields = field(default_factory=dict)  # config.json beside it
    processor: Fields = field(default_factory=dict)  # preprocessor_config.json beside it


@dataclass
class Described:
    """What a family says of a source: everything but the weights themselves."""

    fields: Fields  # of ViTConfig
    preprocess: Fields = field(default_factory=dict)  # of Preprocess, without the size
    labels: tuple[str, ...] | None = None
    notes: list[Note] = field(default_factory=list)  # what was assumed


class Family:
    """One project's checkpoints. A subclass says how to recognise, describe and name them."""

    name: ClassVar[str]
    suffix: ClassVar[str] = ""  # of the file it writes; "" for a folder
    writes: ClassVar[bool] = True
    defaults: ClassVar[Fields] = {}  # what the format implies where it does not say
    preprocess: ClassVar[Fields] = {}  # the documented evaluation transform
    needs: ClassVar[dict[str, tuple[Any, ...]]] = {}  # what its models always are: allowed values of fields
    unused: ClassVar[dict[str, str]] = {}  # tensors that play no part in inference, carried along: our name, theirs

    def recognises(self, source: Source) -> bool:
        raise NotImplementedError

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        """Their tensors under the names of the table, and the quirks needed to undo that."""
        return source.tensors, {}

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        raise NotImplementedError

    def table(self, config: ViTConfig) -> Table:
        raise NotImplementedError

    def restore(self, tensors: Tensors, quirks: Fields) -> Tensors:
        """The inverse of `normalise`."""
        return tensors

    def positioned(self, config: ViTConfig) -> int:
        """How many prefix tokens this format gives a position of their own."""
        return int(config.class_token)

    def sidecars(self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields) -> dict[str, Fields]:
        """JSON files that belong beside the tensors in a folder."""
        return {}


def count_blocks(tensors: Tensors, before: str, after: str) -> int:
    """How many blocks there are, by the names before and after the index."""
    found = {n[len(before) :].split(after)[0] for n in tensors if n.startswith(before)}
    return 1 + max((int(i) for i in found if i.isascii() and i.isdigit() and len(i) < 10), default=-1)


def shape_of(tensors: Tensors, name: str, dims: int) -> tuple[int, ...]:
    """The shape of a tensor that a model of this family must have."""
    if name not in tensors:
        raise CheckpointError(f"The tensor {name} is missing, without which the model cannot be read.")
    shape = tuple(tensors[name].shape)
    if len(shape) != dims:
        raise CheckpointError(f"The tensor {name} has shape {shape}; it should have {dims} dimensions.")
    if 0 in shape:
        raise CheckpointError(f"The tensor {name} is empty: it has shape {shape}.")
    return shape


def guess_heads(width: int, given: Fields, where: str) -> int:
    """The number of heads, which is nowhere in the shapes of a packed attention."""
    if "num_heads" in given:
        return int(given["num_heads"])
    if width not in HEADS:
        example = next(h for h in (width // 64, 8, 6, 4, 3, 2, 1) if h and width % h == 0)
        raise CheckpointError(
            f"{where} does not say how many attention heads a model of width {width} has. Give num_heads, "
            f"for example num_heads={example} in Python or --num-heads {example} on the command line."
        )
    return HEADS[width]


def image_size_for(count: int, stride: tuple[int, int], given: Fields) -> tuple[int, int]:
    """The image size behind `count` patch positions: square if it can be, else as the caller says."""
    side = math.isqrt(max(0, count))
    if count > 0 and side * side == count:
        return side * stride[0], side * stride[1]
    size = given.get("image_size")
    if size and (size[0] // stride[0]) * (size[1] // stride[1]) == count:
        return tuple(size)
    raise CheckpointError(
        f"The file has {count} patch positions, which is not a square, and does not say their shape. Give the image "
        "size it was made for, for example image_size=(224, 448) in Python or --image-size 224 448."
    )


def size_value(size: tuple[int, int]) -> int | list[int]:
    """As other projects write a size: one number where the sides are equal."""
    return size[0] if size[0] == size[1] else list(size)


def known_word(value: Any, known: dict[str, str], what: str) -> str:
    """What `value`, found in a config.json, means to us."""
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(f"config.json names the {what} {value!r}; known are {', '.join(known)}.")
    return known[value]


def prefix_positions(count: int, num_prefix: int) -> int:
    """Of `count` positions, how many belong to prefix tokens: those that leave a square, none if all are patches."""
    for k in range(min(num_prefix, count) + 1):
        if math.isqrt(count - k) ** 2 == count - k > 0:
            return k
    return num_prefix
