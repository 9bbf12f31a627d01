"""The boxes of HEIF files (HEIC, AVIF): which codec a file needs, and whether decoding it is safe.

Owns the checks of HEIC files that libheif leaves out: its limits allow images of a billion pixels, and a file that
lists the same bytes or the same tile many times costs far more than its size suggests. It does not decode, and does not
check what libheif refuses by itself, such as a bitstream that is larger than its item says.

A file is a list of boxes: size, kind, content, which may be a list of boxes. Its items (images, tiles, metadata) are
described in the box `meta`: `iloc` locates their bytes, `iprp` has their sizes, `iref` connects them.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..core.text import pluralize
from ..errors import ImageError

Codec = Literal["AVIF", "HEIC"]

BRANDS_SIZE = 1024  # bytes from which `find_codec` reads the brands; real files have fewer than ten brands of 4 bytes
_CODECS: dict[bytes, Codec] = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIC"),
}
_ANY_CODEC = frozenset({b"mif1", b"msf1"})

_MAX_PADDING = 64  # pixels that an encoder adds to a side, and that the decoder crops again: a block of HEVC
# Pixels to decode and to paste, as a multiple of max_pixels. The photo of a phone needs 2 to 3: tiles, their canvas and
# auxiliary images. A hostile file of 10 KB lists a hundred large tiles, of which its small image shows a corner.
_MAX_WORK = 8
_MAX_COPIED = 256 * 2**20  # bytes of items and metadata that are read more than once
_MAX_ITEMS, _MAX_EXTENTS = 1000, 32  # of a file and of an item: the limits of libheif


@dataclass
class _Items:
    """The items of a file by their identifiers, and their properties.

    Attributes:
        properties: The (width, height) of each property, None if it is not a size.
        sizes: The (width, height) of each image.
        num_bytes: The length of each item.
        end: Where the last item ends in the file.
        references: The kind, the item that refers, and the items that are referred to.
        num_visible: The number of images that are not marked as hidden.
        properties_length: The length of all properties, such as color profiles.
    """

    properties: list[tuple[int, int] | None] = field(default_factory=list)
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    end: int = 0
    references: list[tuple[bytes, int, tuple[int, ...]]] = field(default_factory=list)
    num_visible: int = 0
    properties_length: int = 0


def find_codec(start: bytes) -> Codec | None:
    """Return the codec of a HEIF file, whatever its suffix; None for other files, among them videos.

    Args:
        start: The first `BRANDS_SIZE` bytes of the file.
    """
    if start[4:8] != b"ftyp":
        return None
    end = min(int.from_bytes(start[:4], "big"), len(start))
    brands = [start[k : k + 4] for k in (8, *range(16, end, 4))]  # at 12 is a version
    for brand in brands:
        if brand in _CODECS:
            return _CODECS[brand]
    return None if _ANY_CODEC.isdisjoint(brands) else "HEIC"  # pi-heif then says what it does not support


def check_heic(data: bytes, max_pixels: int) -> None:
    """Refuse a HEIC file that is cut off, or that would cost far more time or memory than an image of `max_pixels`.

    Raises:
        ImageError: The file is refused.
        ValueError: The boxes contradict each other (also `struct.error` and `RecursionError`).
    """
    view = memoryview(data)
    boxes = list(_list_boxes(view))
    contents = [content for kind, content in boxes if kind == b"meta"]
    if not contents and any(kind == b"moov" for kind, _ in boxes):
        raise ImageError("it is a video. Export one image of it as JPEG.", code="image_unsupported")
    if not contents:
        raise ValueError("there is no image in it")
    items = _Items()
    for content in contents:
        _read_meta(content, items)
    if items.end > len(data):
        # libheif makes missing tiles black, and phones store each photo as tiles.
        missing = pluralize(items.end - len(data), "byte")
        reason = f"its end is missing ({missing}). Copy, download or export it again."
        raise ImageError(reason, code="image_damaged")
    _check_work(items, max_pixels)
    _check_memory(items, len(data))


def _list_boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the kind and the content of each box."""
    start = 0
    while start + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        header = 8
        if size == 1:  # the size has 64 bits, after the kind
            (size,), header = struct.unpack_from(">Q", data, start + 8), 16
        elif size == 0:
            size = len(data) - start
        if size < header:
            return  # libheif does not read on, either
        yield kind, data[start + header : start + size]
        start += size


def _read_meta(content: memoryview, items: _Items) -> None:
    boxes = list(_list_boxes(content[4:]))
    for kind, box in tuple(boxes):
        if kind == b"iprp":
            boxes += _list_boxes(box)
        elif kind == b"iinf":  # version and flags, then the number of items
            boxes += _list_boxes(box[8 if box[0] else 6 :])
    for kind, box in sorted(boxes, key=lambda box: box[0] == b"ipma"):  # which refers to the properties, so it is last
        match kind:
            case b"iloc":
                _read_locations(_Reader(box), items)
            case b"iref":
                _read_references(box, items)
            case b"infe":
                bytes(box[8:]).decode()  # the kinds of items: pi-heif crashes if they are not UTF-8
                items.num_visible += not box[3] & 1
            case b"ipco":
                items.properties += [_read_size(*each) for each in _list_boxes(box)]
                items.properties_length += len(box)
            case b"ipma":
                _read_associations(_Reader(box), items)


class _Reader:
    """Reads the integers of a box, which begins with a version and flags."""

    def __init__(self, content: memoryview) -> None:
        self.content = content
        self.position = 0
        self.version = self.read(1)
        self.flags = self.read(3)

    def read(self, num_bytes: int) -> int:
        end = self.position + num_bytes
        if end > len(self.content):
            raise ValueError("a box ends too early")
        value = int.from_bytes(self.content[self.position : end], "big")
        self.position = end
        return value


def _read_locations(reader: _Reader, items: _Items) -> None:
    widths = reader.read(2)
    offset_width, length_width, base_width, index_width = (widths >> shift & 15 for shift in (12, 8, 4, 0))
    index_width = index_width if reader.version else 0
    if not {offset_width, length_width, base_width, index_width} <= {0, 4, 8}:
        raise ValueError("a location has an invalid width")
    id_width = 2 if reader.version < 2 else 4
    num_items = reader.read(id_width)
    _check_count(num_items, _MAX_ITEMS, "items")
    for _ in range(num_items):
        item = reader.read(id_width)
        in_file = not reader.version or reader.read(2) & 15 == 0
        reader.read(2)  # of another file, which is never opened
        base = reader.read(base_width)
        num_extents = reader.read(2)
        _check_count(num_extents, _MAX_EXTENTS, "extents")
        for _ in range(num_extents):
            reader.read(index_width)
            offset, length = base + reader.read(offset_width), reader.read(length_width)
            items.num_bytes[item] = items.num_bytes.get(item, 0) + length
            if in_file:
                items.end = max(items.end, offset + length)


def _check_count(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"it has {count:,} {what}, more than {limit:,}")


def _read_references(box: memoryview, items: _Items) -> None:
    letter, width = ("I", 4) if box[0] else ("H", 2)
    for kind, content in _list_boxes(box[4:]):
        item, count = struct.unpack_from(f">{letter}H", content)
        items.references.append((kind, item, struct.unpack_from(f">{count}{letter}", content, width + 2)))


def _read_size(kind: bytes, content: memoryview) -> tuple[int, int] | None:
    return struct.unpack_from(">II", content, 4) if kind == b"ispe" else None


def _read_associations(reader: _Reader, items: _Items) -> None:
    id_width, index_width = 4 if reader.version else 2, 2 if reader.flags & 1 else 1
    for _ in range(reader.read(4)):
        item = reader.read(id_width)
        for _ in range(reader.read(1)):
            index = reader.read(index_width) & (0x7FFF if index_width == 2 else 0x7F)  # without the bit "essential"
            size = items.properties[index - 1] if 0 < index <= len(items.properties) else None
            if size:
                items.sizes[item] = max(size, items.sizes.get(item, size), key=math.prod)


def _check_work(items: _Items, max_pixels: int) -> None:
    """Refuse an image that shows a small part of large ones."""
    for width, height in items.sizes.values():
        if max(0, width - _MAX_PADDING) * max(0, height - _MAX_PADDING) > max_pixels:
            what = f"it contains an image of {width} x {height} pixels, more than the {max_pixels:,} allowed."
            raise ImageError(f"{what} Shrink it, or raise max_pixels.", code="image_too_large")
    children: dict[int, list[int]] = {}
    for kind, item, others in items.references:
        if kind == b"dimg":  # the tiles of an image
            children.setdefault(item, []).extend(others)
        elif kind == b"auxl":  # the transparency of an image, for example
            for other in others:
                children.setdefault(other, []).append(item)
    counts: dict[int, int] = {}
    num_pixels = max((_count_pixels(item, items, children, counts) for item in items.sizes), default=0)
    if num_pixels > _MAX_WORK * max_pixels:
        what = f"it is made of images with {num_pixels:,} pixels altogether, more than {_MAX_WORK} x {max_pixels:,}."
        raise ImageError(f"{what} Export it as JPEG.", code="image_too_large")


def _count_pixels(item: int, items: _Items, children: dict[int, list[int]], counts: dict[int, int]) -> int:
    """Count the pixels that decoding an item takes, with all that it is made of."""
    if item not in counts:
        counts[item] = 0  # for references in a circle, which libheif refuses
        width, height = items.sizes.get(item, (0, 0))
        parts = (_count_pixels(child, items, children, counts) for child in children.get(item, ()))
        counts[item] = width * height + sum(parts)
    return counts[item]


def _check_memory(items: _Items, length: int) -> None:
    """Refuse a file of which many items are the same bytes: pi-heif copies the metadata of each image when it opens."""
    metadata = items.properties_length
    num_images = items.num_visible
    for kind, item, others in items.references:
        metadata += items.num_bytes.get(item, 0) if kind == b"cdsc" else 0
        num_images += len(others) if kind == b"auxl" else 0
    if sum(items.num_bytes.values()) > length + _MAX_COPIED or metadata * num_images > length + _MAX_COPIED:
        reason = "its images share too much metadata. Export the one that you need as JPEG."
        raise ImageError(reason, code="image_too_large")
