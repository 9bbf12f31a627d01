"""Decoding: every pixel format, every kind of damage, and simplejpeg against Pillow."""

import io
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from patchword.data import image_decoder as images
from patchword.data.image_decoder import DECODE_MARGIN, MAX_PIXELS, list_images, load_image, to_mode
from patchword.data.preprocess import HALF, Preprocess
from patchword.errors import DataError, ImageError

PHOTOS = {name: files("sklearn.datasets.images").joinpath(name).read_bytes() for name in ("china.jpg", "flower.jpg")}
HEIC_FILES = Path(__file__).parents[1] / "fixtures/heic"


def photo(name: str = "china.jpg") -> Image.Image:
    return Image.open(io.BytesIO(PHOTOS[name])).convert("RGB")


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def difference(one: Any, other: Any) -> np.ndarray:
    one, other = np.asarray(one), np.asarray(other)
    assert one.shape == other.shape
    return np.abs(one.astype(int) - other.astype(int))


# ---- simplejpeg ------------------------------------------------------------------------------------------------------

JPEG_KINDS: dict[str, Callable[[Image.Image], bytes]] = {
    "4:4:4": lambda image: encode(image, "JPEG", quality=90, subsampling=0),
    "4:2:2": lambda image: encode(image, "JPEG", quality=90, subsampling=1),
    "4:2:0": lambda image: encode(image, "JPEG", quality=90, subsampling=2),
    "progressive": lambda image: encode(image, "JPEG", quality=80, progressive=True),
    "gray": lambda image: encode(image.convert("L"), "JPEG", quality=90),
    "RGB inside": lambda image: encode(image, "JPEG", quality=90, keep_rgb=True),
}


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_simplejpeg_and_pillow_give_the_same_pixels(name: str, kind: str, scale: int) -> None:
    data = JPEG_KINDS[kind](photo(name).crop((0, 0, 640, 424)))
    fast = images._decode_simplejpeg(Image.open(io.BytesIO(data)), io.BytesIO(data), scale)
    assert fast is not None
    assert fast.size == (640 // scale, 424 // scale)
    slow = images._decode_pillow(Image.open(io.BytesIO(data)), scale)
    assert difference(fast, slow).max() == 0


def test_real_files_use_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_decode_pillow", lambda *_: pytest.fail("Pillow decoded"))
    for name, data in PHOTOS.items():
        assert difference(load_image(data), photo(name)).max() == 0


def test_pillow_decides_if_simplejpeg_refuses() -> None:
    """Garbage between two segments: libjpeg warns, simplejpeg refuses it, and every viewer shows it."""
    data = PHOTOS["china.jpg"]
    start = data.index(b"\xff\xdb")
    corrupted = data[:start] + b"\x00\x01\x02" + data[start:]
    assert images._decode_simplejpeg(Image.open(io.BytesIO(data)), io.BytesIO(corrupted), 1) is None
    decoded = load_image(data[:-2] + b"\x00" * 50 + b"\xff\xd9")
    assert difference(decoded, photo()).mean() < 0.1


def test_simplejpeg_is_not_used_if_the_declared_sizes_differ() -> None:
    small, large = encode(Image.new("RGB", (16, 16)), "JPEG"), encode(Image.new("RGB", (160, 160)), "JPEG")
    assert images._decode_simplejpeg(Image.open(io.BytesIO(small)), io.BytesIO(large), 1) is None


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("name", PHOTOS)
def test_reduced_decoding_hardly_changes_the_pixels(name: str, kind: str) -> None:
    data = JPEG_KINDS[kind](photo(name).crop((0, 0, 640, 424)))
    for size, scale in [(84, 2), (42, 4), (21, 8)]:
        preprocess = Preprocess((size, size), mean=HALF, std=HALF)
        reduced = load_image(data, min_size=preprocess.resize_size)
        assert reduced.size == (640 // scale, 424 // scale)
        moved = difference(preprocess.resize_and_crop(load_image(data)), preprocess.resize_and_crop(reduced))
        assert moved.mean() < 2
        assert moved.max() < 25


@pytest.mark.parametrize(
    ("size", "min_size", "expected"),
    [
        ((4000, 3000), (248, 248), (1000, 750)),
        ((4000, 3000), (int(375 / DECODE_MARGIN), int(500 / DECODE_MARGIN)), (500, 375)),
        ((4000, 3000), (int(375 / DECODE_MARGIN) + 1, 100), (1000, 750)),  # one row short
        ((3998, 2998), (248, 248), (1999, 1499)),  # not divisible by 4
        ((3999, 2999), (248, 248), (3999, 2999)),
        ((340, 256), (248, 248), (340, 256)),
        ((4000, 3000), None, (4000, 3000)),
    ],
)
def test_scale_keeps_margin_and_aspect_ratio(size: Any, min_size: Any, expected: Any) -> None:
    width, height = size
    scale = images._choose_scale(height, width, 1, min_size)
    assert (width // scale, height // scale) == expected
    sideways = None if min_size is None else min_size[::-1]
    assert images._choose_scale(height, width, 6, sideways) == scale


def test_min_size_applies_after_rotation() -> None:
    wide = photo().crop((0, 0, 640, 160))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(wide, "JPEG", exif=exif)  # 160 wide and 640 high when upright
    assert load_image(data, min_size=(120, 30)).size == (80, 320)
    assert load_image(data, min_size=(30, 120)).size == (160, 640)


def test_grayscale_of_a_color_jpeg_equals_that_of_the_png() -> None:
    data = PHOTOS["flower.jpg"]
    assert difference(load_image(data, mode="L"), load_image(encode(photo("flower.jpg"), "PNG"), mode="L")).max() == 0


# ---- orientation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
def test_orientation_matches_exif_transpose(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(photo().crop((100, 100, 180, 148)), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)).convert("RGB"))
    decoded = load_image(data)
    assert decoded.size == ((80, 48) if orientation < 5 else (48, 80))
    assert difference(decoded, expected).max() == 0
    assert ImageOps.exif_transpose(decoded).tobytes() == decoded.tobytes()  # no orientation is left to be applied twice


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_invalid_orientation_is_ignored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert load_image(encode(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).size == (8, 4)


def test_broken_exif_is_ignored() -> None:
    for exif in (
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01" * 40,
        b"Exif\0\0" + b"x" * 9,
    ):
        assert load_image(encode(photo(), "JPEG", exif=exif)).size == (640, 427)


# ---- pixel formats ---------------------------------------------------------------------------------------------------


def gradient(dtype: Any, top: float) -> np.ndarray:
    return np.linspace(0, top, 256).round(0 if top > 1 else 9).astype(dtype).reshape(16, 16)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_values_are_scaled(kind: str) -> None:
    data = encode(Image.fromarray(gradient(np.uint16, 65535)), kind)
    assert Image.open(io.BytesIO(data)).mode.startswith("I")
    decoded = load_image(data, mode="L")
    assert difference(decoded, np.arange(256).reshape(16, 16)).max() == 0
    assert difference(np.asarray(load_image(data))[:, :, 1], decoded).max() == 0


def test_big_endian_sixteen_bit_tiff() -> None:
    image = Image.fromarray(gradient(np.uint16, 65535)).convert("I").convert("I;16B")
    data = encode(image, "TIFF")
    assert Image.open(io.BytesIO(data)).mode == "I;16B"
    assert difference(load_image(data, mode="L"), np.arange(256).reshape(16, 16)).max() == 0


def test_integers_of_unknown_range_are_refused() -> None:
    within = encode(Image.fromarray(gradient(np.int32, 65535)), "TIFF")
    assert difference(load_image(within, mode="L"), np.arange(256).reshape(16, 16)).max() == 0
    for values in (gradient(np.int32, 70000), gradient(np.int32, 1000) - 5):
        with pytest.raises(ImageError, match=rf"{values.min()} .*{values.max()}\b.*0\.\.65535") as error:
            load_image(encode(Image.fromarray(values), "TIFF"))
        assert error.value.code == "image_unsupported"


def test_float_images_range_from_0_to_1() -> None:
    data = encode(Image.fromarray(gradient(np.float32, 1.0)), "TIFF")
    assert difference(load_image(data, mode="L"), np.arange(256).reshape(16, 16)).max() <= 1
    for bad in (1.5, -0.1, np.nan, np.inf):
        values = gradient(np.float32, 1.0)
        values[3, 3] = bad
        with pytest.raises(ImageError, match=rf"{values.min()} .*{values.max()}\b.*0\.\.1\b") as error:
            load_image(encode(Image.fromarray(values), "TIFF"))
        assert error.value.code == "image_unsupported"


def test_transparency_is_composited_on_white() -> None:
    for pixel, expected in [((9, 9, 9, 0), (255, 255, 255)), ((200, 100, 0, 255), (200, 100, 0))]:
        for kind in ("PNG", "WEBP", "TIFF"):
            options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
            data = encode(Image.new("RGBA", (4, 4), pixel), kind, **options)
            assert load_image(data).getpixel((1, 1)) == expected
    half = load_image(encode(Image.new("LA", (4, 4), (0, 128)), "PNG"), mode="L")
    assert half.getpixel((0, 0)) in (126, 127, 128)


def test_palettes_with_and_without_transparency() -> None:
    palette = Image.new("P", (4, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30])
    palette.putdata([0, 1, 2, 3])
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (10, 20, 30)]
    cases: list[tuple[dict[str, Any], list[tuple[int, ...]]]] = [
        ({}, colors),
        ({"transparency": 1}, [colors[0], (255, 255, 255), *colors[2:]]),
        ({"transparency": b"\xff\x00\xff\x00"}, [colors[0], (255, 255, 255), colors[2], (255, 255, 255)]),
    ]
    for options, expected in cases:
        decoded = load_image(encode(palette, "PNG", **options))
        assert [decoded.getpixel((x, 0)) for x in range(4)] == expected
    decoded = load_image(encode(palette, "GIF", transparency=2))
    assert [decoded.getpixel((x, 0)) for x in range(4)] == [*colors[:2], (255, 255, 255), colors[3]]
    assert load_image(encode(palette, "PNG"), mode="L").getpixel((1, 0)) == 150  # 0.587 x 255


def test_single_transparent_color_is_composited_on_white() -> None:
    data = encode(Image.new("RGB", (2, 2), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert load_image(data).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    """Pillow writes CMYK JPEGs inverted and with Adobe's marker, as Photoshop does."""
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # red
    data = encode(ink, kind)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert difference(load_image(data), np.full((16, 16, 3), (255, 0, 0))).max() <= 3
    assert load_image(data, mode="L").getpixel((0, 0)) in range(73, 80)


def test_ycck() -> None:
    """Adobe's marker is 2 instead of 0: the first three channels are stored as luma and chroma."""
    data = encode(Image.new("CMYK", (16, 16), (100, 100, 100, 50)), "JPEG")
    marker = data.index(b"Adobe")
    ycck = data[: marker + 11] + b"\x02" + data[marker + 12 :]
    expected = Image.open(io.BytesIO(ycck)).convert("RGB")
    assert difference(expected, load_image(data)).max() > 20  # the marker is respected
    assert difference(load_image(ycck), expected).max() == 0


def test_large_cmyk_jpeg_is_decoded_at_reduced_scale() -> None:
    data = encode(photo().crop((0, 0, 640, 424)).convert("CMYK"), "JPEG", quality=95)
    assert load_image(data, min_size=(40, 40)).size == (160, 106)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP"])
def test_lossless_formats_round_trip(kind: str) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8))
    if kind == "GIF":
        image = image.quantize(16).convert("RGB")
    data = encode(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert difference(load_image(data), image).max() == 0


def test_one_bit() -> None:
    image = Image.new("1", (3, 1))
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "TIFF", "BMP", "PPM"):
        assert np.asarray(load_image(encode(image, kind), mode="L")).tolist() == [[0, 255, 0]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((200, 0, 0), (0, 200, 0), (0, 0, 200))]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert difference(load_image(data), np.full((8, 8, 3), (200, 0, 0))).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "PPM"])
def test_one_pixel(kind: str) -> None:
    decoded = load_image(encode(Image.new("RGB", (1, 1), "white"), kind), min_size=(224, 224))
    assert decoded.size == (1, 1)
    assert decoded.getpixel((0, 0)) == (255, 255, 255)


def test_to_mode_names_unsupported_color_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("conversion from LAB to RGB not supported")

    monkeypatch.setattr(Image.Image, "convert", refuse)  # as in Pillow 12; Pillow 13 supports it
    with pytest.raises(ImageError, match="LAB") as error:
        to_mode(Image.new("LAB", (2, 2)), "RGB")
    assert error.value.code == "image_unsupported"


def test_premultiplied_transparency() -> None:
    premultiplied = Image.new("RGBA", (2, 2), (100, 0, 0, 0)).convert("RGBa")
    assert to_mode(premultiplied, "RGB").getpixel((0, 0)) == (255, 255, 255)


def test_result_holds_no_open_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    photo().save(path)
    decoded = load_image(path)
    path.unlink()
    assert type(decoded) is Image.Image
    assert decoded.info == {}
    assert decoded.getpixel((0, 0)) == photo().getpixel((0, 0))


# ---- errors ----------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_bomb(width: int, height: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 9999)) + chunk(b"IEND", b"")


def gif_bomb(width: int, height: int) -> bytes:
    """A screen of 1 x 1 and a frame of the given size: Pillow checks such frames itself, in the plugin."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00;"


def test_decompression_bomb_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    for data in (png_bomb(20000, 20000), png_bomb(10001, 10000), gif_bomb(60000, 60000), gif_bomb(10000, 12000)):
        with pytest.raises(ImageError) as error:
            load_image(data)
        assert error.value.code == "image_too_large"


def test_max_pixels() -> None:
    data = encode(Image.new("RGB", (20, 20)), "PNG")
    assert load_image(data, max_pixels=400).size == (20, 20)
    with pytest.raises(ImageError, match=r"20 x 20 .*399 .*max_pixels") as error:
        load_image(data, max_pixels=399)
    assert error.value.code == "image_too_large"
    assert MAX_PIXELS == 100_000_000


def test_no_warning_below_max_pixels() -> None:
    """90 to 100 million pixels: Pillow warns, patchword accepts; the only error is that the file is truncated."""
    for action in ("error", "default"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)  # type: ignore[arg-type]
            with pytest.raises(ImageError) as error:
                load_image(png_bomb(9500, 10000))
            assert error.value.code == "image_damaged"
            assert caught == []


def test_existing_bomb_warning_filter_is_respected() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with pytest.raises(ImageError) as error:
            load_image(png_bomb(9500, 10000))
        assert error.value.code == "image_too_large"


def test_metadata_warnings_are_suppressed() -> None:
    """An animation without frames: Pillow warns and uses the still image."""
    data = encode(Image.new("RGB", (4, 4), "red"), "PNG")
    broken = data[:33] + chunk(b"acTL", struct.pack(">II", 0, 0)) + data[33:]  # after signature and IHDR
    for action in ("error", "default", "always"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)  # type: ignore[arg-type]
            if action == "always":
                Image.open(io.BytesIO(broken)).load()
                assert caught  # Pillow itself warns
                caught.clear()
            assert load_image(broken).getpixel((0, 0)) == (255, 0, 0)
            assert caught == []


@pytest.mark.parametrize("end", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM"])
def test_truncated_files_are_refused(kind: str, end: float, tmp_path: Path) -> None:
    path = tmp_path / "holiday.img"
    data = encode(photo().crop((0, 0, 64, 64)), kind)
    path.write_bytes(data[: int(len(data) * end)])
    with pytest.raises(ImageError, match=r"holiday\.img: .*\. [A-Z]") as error:  # a reason and an advice
        load_image(path)
    assert error.value.code in ("image_damaged", "image_unsupported")


def test_files_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello, this is not an image")
    (tmp_path / "drawing.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    cases = {
        "empty.jpg": "image_empty",
        "text.jpg": "image_unsupported",
        "drawing.eps": "image_unsupported",
        "missing.jpg": "image_not_found",
        "text.jpg/below.jpg": "image_not_found",
        "pipe.jpg": "image_not_a_file",
        ".": "image_not_a_file",
        "nul\0.jpg": "image_damaged",
        "long" * 100: "image_damaged",
    }
    for name, code in cases.items():
        with pytest.raises(ImageError) as error:
            load_image(str(tmp_path / name))
        assert error.value.code == code
        assert str(error.value) == f"Cannot read {tmp_path / name}: {error.value.reason}"
    for called, shown in ((None, "<bytes>"), ("a.tar:b.png", "a.tar:b.png")):
        with pytest.raises(ImageError) as error:
            load_image(b"", name=called)
        assert error.value.code == "image_empty"
        assert str(error.value) == f"Cannot read {shown}: {error.value.reason}"


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.png"
    photo().save(path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)  # chmod does not stop root, and tests often run as root
    with pytest.raises(ImageError, match=r"secret\.png") as error:
        load_image(path)
    assert error.value.code == "image_permission_denied"


def small_files() -> dict[str, bytes]:
    image = photo().crop((200, 150, 232, 174))
    frames = [image, image.transpose(Image.Transpose.ROTATE_180)]
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "JPEG": encode(image, "JPEG", exif=exif),
        "progressive JPEG": encode(image, "JPEG", progressive=True, subsampling=0),
        "CMYK JPEG": encode(image.convert("CMYK"), "JPEG"),
        "PNG": encode(image, "PNG", exif=exif),
        "palette PNG": encode(image.quantize(8), "PNG", transparency=b"\x00\x80\xff"),
        "16-bit PNG": encode(Image.fromarray(gradient(np.uint16, 65535)), "PNG"),
        "APNG": encode(image, "PNG", save_all=True, append_images=frames[1:]),
        "GIF": encode(image, "GIF", save_all=True, append_images=frames[1:]),
        "WebP": encode(image, "WEBP", exif=exif),
        "animated WebP": encode(image, "WEBP", save_all=True, append_images=frames[1:]),
        "TIFF": encode(image, "TIFF", exif=exif),
        "compressed TIFF": encode(image, "TIFF", compression="tiff_lzw"),
        "float TIFF": encode(Image.fromarray(gradient(np.float32, 1.0)), "TIFF"),
        "BMP": encode(image, "BMP"),
        "PPM": encode(image, "PPM"),
        "AVIF": encode(image, "AVIF", exif=exif),
        "animated AVIF": encode(image, "AVIF", save_all=True, append_images=frames[1:]),
        "HEIC": (HEIC_FILES / "rotated.heic").read_bytes(),
        "tiled HEIC": (HEIC_FILES / "tiles.heic").read_bytes(),
    }


SMALL_FILES = small_files()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL_FILES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_damage_gives_an_image_or_image_error(kind: str, data: st.DataObject) -> None:
    content = bytearray(SMALL_FILES[kind])
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    # Headers matter most, so half of the bit flips go there.
    offsets = st.one_of(st.integers(0, len(content) - 1), st.integers(0, min(100, len(content) - 1)))
    for offset, bit in data.draw(st.lists(st.tuples(offsets, st.integers(0, 7)), max_size=6)):
        content[offset] ^= 1 << bit
    try:
        decoded = load_image(bytes(content[:end]), min_size=(4, 4), max_pixels=1_000_000)
    except ImageError as error:
        message = str(error)
    else:
        assert decoded.mode == "RGB"
        assert decoded.width * decoded.height <= 1_000_000
        assert np.asarray(decoded).dtype == np.uint8
        return
    assert message.startswith("Cannot read <bytes>: ")


def test_decoding_is_thread_safe() -> None:
    contents = list(SMALL_FILES.values()) * 8
    expected = [load_image(content).tobytes() for content in contents]
    with ThreadPoolExecutor(8) as pool:
        assert [image.tobytes() for image in pool.map(load_image, contents)] == expected


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_list_images_is_sorted_and_recursive(tmp_path: Path) -> None:
    expected = ["a.JPG", "b/c.png", "b/d/e.webp", "z.tiff"]
    for name in [*expected, ".hidden.jpg", ".cache/x.jpg", "b/notes.txt", "b/.x/y.png", "jpg"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jpg").mkdir()
    assert list_images(tmp_path) == [tmp_path / name for name in expected]
    assert list_images(str(tmp_path)) == list_images(tmp_path)


def test_list_images_follows_links_without_cycles(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    (real / "x.jpg").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(real)
    (real / "back").symlink_to(root)
    assert list_images(root) == [root / "linked" / "x.jpg"]


def test_list_images_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing.*not exist"):
        list_images(tmp_path / "missing")
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}\..*\.jpeg, \.jpg"):  # the supported suffixes
        list_images(tmp_path)
    (tmp_path / "a.jpg").touch()
    with pytest.raises(DataError, match=r"a\.jpg .*folder"):
        list_images(tmp_path / "a.jpg")


def test_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.jpg").touch()
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="locked: Permission denied"):
        list_images(tmp_path)


def test_jpeg_with_too_many_scans_is_refused() -> None:
    """Each scan is a pass over all pixels: a few megabytes of scans would keep a decoder busy for an hour."""
    data = encode(photo().resize((32, 32)), "JPEG", progressive=True)
    assert load_image(data, mode="RGB").size == (32, 32)
    assert data.count(b"\xff\xda") > 3
    last = data.rindex(b"\xff\xda")
    with pytest.raises(ImageError, match=r"\d+ scans.*\b500\b") as error:
        load_image(data[:last] + data[last:-2] * 600 + data[-2:], mode="RGB")
    assert error.value.code == "image_unsupported"
