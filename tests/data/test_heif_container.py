"""HEIC and AVIF: pixels, the optional package, damaged files, and files that are made to cost time or memory."""

import io
import shutil
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from patchword.data import heif_container
from patchword.data.heif_container import check_heic, find_codec
from patchword.data.image_decoder import list_images, load_image
from patchword.data.sources import FileSource
from patchword.doctor.image_survey import summarize_image
from patchword.errors import ImageError

FOLDER = Path(__file__).parents[1] / "fixtures/heic"
QUADRANTS = Image.new("RGB", (2, 2))
QUADRANTS.putdata([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)])


def heic(name: str) -> bytes:
    return (FOLDER / f"{name}.heic").read_bytes()


def quadrants(size: tuple[int, int] = (96, 64)) -> Image.Image:
    return QUADRANTS.resize(size, Image.Resampling.NEAREST)


def avif(image: Image.Image | None = None, **options: int) -> bytes:
    file = io.BytesIO()
    (image or quadrants()).save(file, "AVIF", quality=100, subsampling="4:4:4", **options)
    return file.getvalue()


def largest_difference(one: Image.Image, other: Image.Image) -> int:
    assert one.mode == other.mode
    assert one.size == other.size
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max())


def refusal(data: bytes | Path, **options: int) -> ImageError:
    with pytest.raises(ImageError) as error:
        load_image(data, **options)
    return error.value


# ---- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "tolerance"),
    [("quadrants", (96, 64), 0), ("deep", (96, 64), 0), ("tiles", (160, 128), 0), ("photo", (96, 64), 3)],
)
def test_heic_pixels(name: str, size: tuple[int, int], tolerance: int) -> None:
    assert largest_difference(load_image(heic(name)), quadrants(size)) <= tolerance
    assert largest_difference(load_image(heic(name), mode="L"), quadrants(size).convert("L")) <= tolerance


def test_gray_heic() -> None:
    gray = quadrants().convert("L")
    assert largest_difference(load_image(heic("gray"), mode="L"), gray) <= 1
    assert largest_difference(load_image(heic("gray")), gray.convert("RGB")) <= 1


@pytest.mark.parametrize(
    ("name", "transpose"), [("rotated", Image.Transpose.ROTATE_270), ("transposed", Image.Transpose.TRANSPOSE)]
)
def test_heic_is_upright(name: str, transpose: Image.Transpose) -> None:
    """The orientation is in EXIF, too, but must be applied once."""
    decoded = load_image(heic(name))
    assert largest_difference(decoded, quadrants().transpose(transpose)) == 0
    assert decoded.info == {}
    assert not decoded.getexif()


def test_transparent_heic_is_composited_on_white() -> None:
    expected = quadrants()
    expected.paste("white", (0, 0, 96, 32))
    assert largest_difference(load_image(heic("transparent")), expected) == 0


def test_suffix_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(heic("tiles"))
    (tmp_path / "photo.heic").write_bytes(avif())
    assert load_image(tmp_path / "photo.jpg").size == (160, 128)
    assert load_image(tmp_path / "photo.heic").size == (96, 64)


def test_avif_pixels() -> None:
    assert largest_difference(load_image(avif()), quadrants()) <= 2
    assert largest_difference(load_image(avif(), mode="L"), quadrants().convert("L")) <= 2


def test_avif_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    quadrants().save(file, "AVIF", quality=100, subsampling="4:4:4", exif=exif)
    expected = quadrants().transpose(Image.Transpose.ROTATE_270)
    assert largest_difference(load_image(file.getvalue()), expected) <= 2


def test_transparent_avif_is_composited_on_white() -> None:
    image = quadrants()
    image.putalpha(0)
    assert largest_difference(load_image(avif(image)), Image.new("RGB", (96, 64), "white")) == 0


def test_folders_list_heic_and_avif(tmp_path: Path) -> None:
    names = ["IMG_0001.HEIC", "a.avif", "b.heif", "c.hif"]
    for name in [*names, "clip.mov", "clip.mp4"]:
        (tmp_path / name).touch()
    assert [path.name for path in list_images(tmp_path)] == names


def test_doctor_summarizes_heic_and_avif(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "rotated.heic", tmp_path / "a.heic")
    (tmp_path / "b.avif").write_bytes(avif())
    source = FileSource(["a.heic", "b.avif"], ["x"], np.zeros(2, np.int64), tmp_path)
    summaries = [summarize_image(source, index) for index in range(2)]
    assert [getattr(summary, "size", summary) for summary in summaries] == [(96, 64), (64, 96)]


# ---- packages --------------------------------------------------------------------------------------------------------


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    error = refusal(FOLDER / "photo.heic")
    assert error.code == "image_unsupported"
    assert "pi-heif" in error.reason
    assert error.reason.endswith("pip install -c constraints.txt '.[heic]'.")
    assert load_image(avif()).size == (96, 64)  # Pillow decodes it


def test_pillow_without_avif(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check", lambda name: name != "avif")
    error = refusal(avif())
    assert error.code == "image_unsupported"
    assert "Pillow" in error.reason


@pytest.mark.parametrize(
    ("brands", "codec"),
    [
        (b"heic\0\0\0\0mif1MiHBmiafheic", "HEIC"),
        (b"mif1\0\0\0\0mif1heic", "HEIC"),
        (b"heix\0\0\0\0mif1heix", "HEIC"),
        (b"mif1\0\0\0\0mif1miaf", "HEIC"),
        (b"mif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"avis\0\0\0\0avifavis", "AVIF"),
        (b"isom\0\0\x02\0isomiso2avc1mp41", None),
        (b"qt  \0\0\0\0qt  ", None),
        (b"mp42\0\0heicmp42", None),  # what looks like a brand is the version
    ],
)
def test_codec_is_found_by_the_brands(brands: bytes, codec: str | None) -> None:
    assert find_codec(box(b"ftyp", brands) + b"avif" * 9) == codec
    assert find_codec(b"ftyp" + brands) is None


# ---- hostile and damaged files ---------------------------------------------------------------------------------------


def box(kind: bytes, *contents: bytes) -> bytes:
    content = b"".join(contents)
    return struct.pack(">I4s", 8 + len(content), kind) + content


def full_box(kind: bytes, *contents: bytes, version: int = 0, flags: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags), *contents)


def find_box(data: bytes, kind: bytes) -> bytes:
    start = data.index(kind) - 4
    return data[start : start + int.from_bytes(data[start : start + 4], "big")]


def size_box(width: int, height: int, flags: int = 0) -> bytes:
    return full_box(b"ispe", struct.pack(">II", width, height), flags=flags)


def heif_file(
    items: dict[bytes, bytes],
    properties: Iterable[bytes] = (),
    references: Iterable[bytes] = (),
    associations: Iterable[tuple[int, int]] = (),
) -> bytes:
    """Write a HEIC file.

    Args:
        items: The kind of each item, which may be followed by a number, and its content. Items are numbered from 1, the
            first is shown, and those of equal content share the same bytes.
        properties: Boxes, numbered from 1.
        references: Boxes.
        associations: Pairs of an item and its property.
    """
    contents = list(dict.fromkeys(items.values()))
    starts = dict(zip(contents, np.cumsum([0, *map(len, contents)]).tolist(), strict=False))
    entries = [
        full_box(b"infe", struct.pack(">HH", k, 0), kind[:4], b"\0", version=2, flags=int(k > 1))
        for k, kind in enumerate(items, 1)
    ]
    by_item: dict[int, list[int]] = {}
    for item, index in associations:
        by_item.setdefault(item, []).append(index)
    pairs = b"".join(struct.pack(">HB", item, len(found)) + bytes(found) for item, found in by_item.items())
    ipma = full_box(b"ipma", struct.pack(">I", len(by_item)), pairs)

    def header(offset: int) -> bytes:
        places = [
            struct.pack(">HHHII", k, 0, 1, offset + starts[content], len(content))
            for k, content in enumerate(items.values(), 1)
        ]
        meta = full_box(
            b"meta",
            full_box(b"hdlr", bytes(4), b"pict", bytes(13)),
            full_box(b"pitm", struct.pack(">H", 1)),
            full_box(b"iinf", struct.pack(">H", len(items)), *entries),
            *([full_box(b"iref", *references)] if references else []),
            box(b"iprp", box(b"ipco", *properties), ipma),
            full_box(b"iloc", struct.pack(">HH", 0x4400, len(items)), *places),
        )
        return box(b"ftyp", b"heic\0\0\0\0mif1heic") + meta

    return header(len(header(0)) + 8) + box(b"mdat", *contents)


def reference(kind: bytes, item: int, *others: int) -> bytes:
    return box(kind, struct.pack(f">HH{len(others)}H", item, len(others), *others))


def tiled_file(num_tiles: int, size: tuple[int, int] = (96, 64), flags: int = 0, nested: bool = False) -> bytes:
    """Return an image of 10 x 10 pixels that shows the corner of its first tile, of 96 x 64 pixels."""
    source = heic("quadrants")
    spec = struct.pack(">BBBBHH", 0, 0, 0, num_tiles - 1, 10, 10)
    tile = find_box(source, b"mdat")[8:]
    properties = [find_box(source, b"hvcC"), size_box(*size, flags), size_box(10, 10)]
    numbers = range(2, num_tiles + 2)
    if not nested:
        items = {b"grid": spec, **{b"hvc1%d" % k: tile for k in numbers}}
        pairs = [(1, 3), *((k, index) for k in numbers for index in (1, 2))]
        return heif_file(items, properties, [reference(b"dimg", 1, *numbers)], pairs)
    # Each tile is a grid, too, and all of them have the same tile.
    last, inner = num_tiles + 2, struct.pack(">BBBBHH", 0, 0, 0, 0, 10, 10)
    items = {b"grid": spec, **{b"grid%d" % k: inner for k in numbers}, b"hvc1": tile}
    references = [reference(b"dimg", 1, *numbers), *(reference(b"dimg", k, last) for k in numbers)]
    return heif_file(items, properties, references, [(1, 3), *((k, 3) for k in numbers), (last, 1), (last, 2)])


def test_the_files_of_these_tests_can_be_decoded() -> None:
    for data in (tiled_file(1), tiled_file(3, flags=5), tiled_file(3, nested=True), metadata_file(2, 100)):
        assert load_image(data).getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize("name", ["quadrants", "tiles", "rotated", "transparent"])
def test_max_pixels_of_heic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width, height = load_image(heic(name)).size
    assert load_image(heic(name), max_pixels=width * height).size == (width, height)
    monkeypatch.setattr("pi_heif.HeifFile.to_pillow", lambda self: pytest.fail("it was decoded"))
    error = refusal(heic(name), max_pixels=width * height - 1)
    assert error.code == "image_too_large"
    assert f"{width} x {height}" in error.reason


def test_max_pixels_of_avif(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    assert refusal(avif(), max_pixels=96 * 64 - 1).code == "image_too_large"


@pytest.mark.parametrize("flags", [0, 5])
def test_huge_heic_is_refused_before_it_is_opened(flags: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a small image shows a part of it. libheif ignores the flags of sizes."""
    monkeypatch.setattr("pi_heif.open_heif", lambda data: pytest.fail("it was opened"))
    error = refusal(tiled_file(1, (20000, 20000), flags))
    assert error.code == "image_too_large"
    assert "20000 x 20000" in error.reason


def test_image_larger_than_it_says_is_refused() -> None:
    """A check of libheif, from version 1.22 on."""
    data = heic("quadrants")
    lie = data.replace(find_box(data, b"ispe"), size_box(8, 8))
    assert lie != data
    assert refusal(lie).code in ("image_damaged", "image_unsupported")


@pytest.mark.parametrize("nested", [False, True])
def test_many_large_tiles_are_refused(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few kilobytes could keep a decoder busy for an hour."""
    assert load_image(tiled_file(20, nested=nested), max_pixels=96 * 64 * 3).size == (10, 10)
    monkeypatch.setattr("pi_heif.open_heif", lambda data: pytest.fail("it was opened"))
    assert refusal(tiled_file(20, nested=nested), max_pixels=96 * 64 * 2).code == "image_too_large"


def metadata_file(num_copies: int, length: int, kind: bytes = b"cdsc") -> bytes:
    """Return an image with many blocks of EXIF, which are the same bytes."""
    source = heic("quadrants")
    numbers = range(2, num_copies + 2)
    items = {b"hvc1": find_box(source, b"mdat")[8:], **{b"Exif%d" % k: bytes(length) for k in numbers}}
    properties = [find_box(source, b"hvcC"), size_box(96, 64)]
    return heif_file(items, properties, [reference(kind, k, 1) for k in numbers], [(1, 1), (1, 2)])


def test_metadata_that_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heif_container, "_MAX_COPIED", 10_000)
    assert load_image(metadata_file(5, 1000)).size == (96, 64)
    monkeypatch.setattr("pi_heif.open_heif", lambda data: pytest.fail("it was opened"))
    for kind in (b"cdsc", b"thmb"):
        assert refusal(metadata_file(50, 1000, kind)).code == "image_too_large"


def test_metadata_of_many_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image gets a copy of the metadata that it shares with others; depth maps count as images."""
    monkeypatch.setattr(heif_container, "_MAX_COPIED", 10_000)
    items = {b"hvc1": b"x", b"Exif": bytes(2000), **{b"hvc1%d" % k: b"x" for k in range(3, 20)}}
    data = heif_file(
        items, (), [reference(b"cdsc", 2, *range(1, 20)), *(reference(b"auxl", k, 1) for k in range(3, 20))]
    )
    assert refusal(data).code == "image_too_large"


def test_wrong_bit_depth_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """pi-heif would write beyond the pixels, so it decodes no grayscale image that claims more than 8 bits."""
    monkeypatch.setattr("pi_heif.HeifFile.to_pillow", lambda self: pytest.fail("it was decoded"))
    lie = heic("gray").replace(b"\xfc\xfc\xf8\xf8", b"\xfc\xfc\xf9\xf8", 1)  # in the configuration of the codec
    assert lie != heic("gray")
    for data in (lie, heic("deep_gray")):
        assert refusal(data).code == "image_unsupported"


def test_kind_of_item_that_is_not_text_is_refused_before_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """pi-heif would crash."""
    monkeypatch.setattr("pi_heif.open_heif", lambda data: pytest.fail("it was opened"))
    data = heic("rotated")
    assert data.count(b"Exif\0\0\0\0") == 1
    assert refusal(data.replace(b"Exif\0\0\0\0", b"Ex\xf8f\0\0\0\0")).code == "image_damaged"


def test_references_in_a_circle() -> None:
    items = {b"grid1": b"x", b"grid2": b"x"}
    circle = [reference(b"dimg", 1, 2), reference(b"dimg", 2, 1)]
    check_heic(heif_file(items, [size_box(9, 9)], circle, [(1, 1), (2, 1)]), 100)
    chain = [reference(b"dimg", k, k + 1) for k in range(1, 60_000)]
    assert refusal(heif_file({b"grid": b"x"}, [size_box(9, 9)], chain, [(1, 1)])).code == "image_unsupported"


def test_limits_of_the_item_list() -> None:
    """The limits are those of libheif; without them, reading the list itself would take minutes."""
    for counts in (struct.pack(">HH", 0, 1001), struct.pack(">HHHHH", 0, 1, 1, 0, 60_000)):
        meta = full_box(b"meta", full_box(b"iloc", counts, bytes(40_000)))
        assert refusal(box(b"ftyp", b"heic\0\0\0\0heic") + meta).code == "image_damaged"


@pytest.mark.parametrize("name", ["quadrants", "tiles", "rotated", "transparent", "gray"])
def test_truncated_heic(name: str) -> None:
    data = heic(name)
    for end in [*range(24, len(data) - 1, 29), len(data) - 1]:
        assert refusal(data[:end]).code == "image_damaged", end


def test_truncated_avif() -> None:
    data = avif()
    for end in [*range(24, len(data) - 1, 29), len(data) - 1]:
        assert refusal(data[:end]).code == "image_damaged", end


def test_data_up_to_the_end_of_the_file() -> None:
    """The last box may leave its size open; what is missing then shows in the list of items."""
    data = heic("tiles")
    start = data.index(b"mdat") - 4
    unsized = data[:start] + bytes(4) + data[start + 4 :]
    assert largest_difference(load_image(unsized), quadrants((160, 128))) == 0
    assert refusal(unsized[:-1]).code == "image_damaged"
    assert load_image(data + b"trailer of some phone").size == (160, 128)


@pytest.mark.parametrize("brand", [b"isom", b"mp42", b"qt  ", b"hvc1", b"hevc", b"msf1"])
def test_videos_are_not_supported(brand: bytes, tmp_path: Path) -> None:
    """The last two are brands of HEIC sequences, which are stored as a video."""
    path = tmp_path / "clip.heic"
    path.write_bytes(box(b"ftyp", brand, bytes(4), brand) + box(b"moov", bytes(200)) + box(b"mdat", bytes(99)))
    assert refusal(path).code == "image_unsupported"


def test_other_codecs_are_not_supported() -> None:
    data = heic("quadrants")
    for codec in (b"jpeg", b"avc1", b"unci"):
        other = data[:24] + data[24:].replace(b"hvc1", codec)
        assert other != data
        assert refusal(other).code == "image_unsupported"
