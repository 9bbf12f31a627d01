"""Decode image files to 8-bit Pillow images; every failure is an `ImageError`.

Owns decoding, EXIF orientation, conversion of every pixel format to RGB or grayscale, and limits against malicious
files. It does not know the input size of a model (`min_size` is only a hint) or any later transform.

Thread-safe: a call changes no global state, apart from the warning filters described at `_silence_pillow`.
"""

import io
import os
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError, features

from ..errors import DataError, ImageError, how_to_install
from .heif_container import BRANDS_SIZE, check_heic, find_codec

Mode = Literal["RGB", "L"]
"""The mode of a decoded image, as in Pillow: RGB or grayscale."""

# Only the formats of photos and screenshots. Pillow opens about forty formats, among them interpreters (EPS calls
# Ghostscript) and decoders that are hardly tested. HEIC is not in this list: it is decoded without Pillow.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
IMAGE_SUFFIXES = frozenset(
    [
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif", ".hif"),  # .hif: some cameras
    ]
)

# 300 MB as RGB. A file of a few kilobytes can declare a thousand times as much.
MAX_PIXELS = 100_000_000
MAX_SCANS = 500  # of a progressive JPEG; encoders write a dozen at most

# How much larger than `min_size` a JPEG decoded at reduced scale must be. The decoder's downscaling is cruder than
# Pillow's, and this margin hides it. Measured on 250 ImageNet images (sides cut to multiples of 8), shrunk to exactly
# 1/DECODE_MARGIN of the decoded size by Preprocess.resize_and_crop, against a full decode: mean difference 0.5, 0.6,
# 0.7 gray levels at scale 1/2, 1/4, 1/8; worst image 2.1, worst pixel 14. With a margin of 2.0: mean 0.8 to 1.2, worst
# image 2.8, worst pixel 20; with 3.0: mean 0.4 to 0.5, worst image 1.8, worst pixel 12.
DECODE_MARGIN = 2.5

_ORIENTATION_TAG = 0x0112
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})


def load_image(
    source: str | Path | bytes,
    *,
    mode: Mode = "RGB",
    min_size: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> Image.Image:
    """Decode a file or its bytes to an upright image with 8 bits per channel. Raises only `ImageError`.

    Only the first frame of an animation is decoded. `to_mode` describes transparency and higher bit depths.

    Args:
        mode: "RGB" or "L" (grayscale).
        min_size: (height, width) to which the caller will shrink the image. A large JPEG may then be decoded at 1/2,
            1/4 or 1/8 of its size, which is several times faster.
        max_pixels: larger images are refused before decoding. Pillow has its own limit, twice
            `PIL.Image.MAX_IMAGE_PIXELS` (179 million); to exceed it, raise that as well.
        name: of the image in error messages; its path by default.
    """
    _silence_pillow()
    name = name or ("<bytes>" if isinstance(source, bytes) else str(source))
    try:
        with _open(source) as file:
            return _decode(file, mode, min_size, max_pixels)
    except ImageError as error:
        raise ImageError(error.reason, name=name, code=error.code) from error
    except Exception as error:
        # For damaged files Pillow's plugins raise nearly every exception type (SyntaxError, struct.error, KeyError,
        # ZeroDivisionError, MemoryError, ...), so no list of types would be complete.
        reason, code = _explain(error)
        raise ImageError(reason, name=name, code=code) from error


def to_mode(image: Image.Image, mode: Mode) -> Image.Image:
    """Convert any Pillow image to 8-bit RGB or grayscale, without metadata.

    Transparent images are composited on white: cut-outs and logos are made for white pages, and the colors of fully
    transparent pixels are arbitrary, often black. 16-bit values are divided by 257 (65535 becomes 255), floats are
    multiplied by 255. Values outside 0..65535 or 0..1 raise `ImageError`, because the white level is unknown.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_eight_bits(image)
    elif image.has_transparency_data:
        image = _composite_on_white(image)
    try:
        converted = image.convert(mode)  # a copy even if the mode is right: the result must not hold a file
    except ValueError as error:  # for example LAB
        reason = f"its color mode {image.mode} cannot be converted to {mode}. Save it as RGB."
        raise ImageError(reason, code="image_unsupported") from error
    converted.info = {}  # otherwise the next reader could apply the EXIF orientation again
    return converted


def list_images(folder: str | Path) -> list[Path]:
    """List all image files below a folder, sorted, by suffix; hidden files and folders are skipped."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder{'' if folder.exists() else ', it does not exist'}. Check the path.")
    files = sorted(_walk(folder))
    if not files:
        supported = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(f"There are no images below {folder}. Supported suffixes: {supported}.")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Yield image files. Symbolic links are followed, but no folder is visited twice: links can form cycles."""
    visited = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_raise_unreadable):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield Path(parent, name)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"Cannot list {error.filename}: {error.strerror}. Make it readable, or remove it.") from error


def _silence_pillow() -> None:
    """Ignore Pillow's warnings about damaged metadata, which are never used.

    `catch_warnings` in every call would not be thread-safe, so permanent filters are added. They are checked in each
    call because an enclosing `catch_warnings` (pytest has one around each test) removes them again. `max_pixels`
    handles decompression bombs, so Pillow's warning is ignored too, unless the program has its own filter for it (if
    that makes it an error, the caller gets an `ImageError`).
    """
    if _METADATA_FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    if not any(category is Image.DecompressionBombWarning for _, _, category, _, _ in warnings.filters):
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


_METADATA_FILTER = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)
_silence_pillow()


def _open(source: str | Path | bytes) -> BinaryIO:
    if isinstance(source, bytes):
        if not source:
            raise ImageError("it is empty. Was the upload or download cut off?", code="image_empty")
        return io.BytesIO(source)
    status = os.stat(source)
    if stat.S_ISDIR(status.st_mode):
        raise ImageError("it is a folder. Give an image inside it.", code="image_not_a_file")
    if not stat.S_ISREG(status.st_mode):
        # A pipe could block, and /dev/zero never ends.
        raise ImageError("it is not a regular file. Give an image file.", code="image_not_a_file")
    if status.st_size == 0:
        raise ImageError("it is empty. Was the copy or download cut off?", code="image_empty")
    return open(source, "rb")


def _explain(error: Exception) -> tuple[str, str]:
    """Return what is wrong and what to do, and the error code."""
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return "there is no such file. Check the path.", "image_not_found"
        case PermissionError():
            return "permission is denied. Make the file readable.", "image_permission_denied"
        case UnidentifiedImageError():
            formats = ", ".join((*FORMATS, "HEIC"))
            return f"it is not an image in a supported format. Use {formats}.", "image_unsupported"
        case Image.DecompressionBombError() | Image.DecompressionBombWarning():
            return "it has far more pixels than are allowed. Shrink it first.", "image_too_large"
        case MemoryError():
            return "there is not enough memory for it. Shrink it first.", "image_out_of_memory"
    detail = " ".join(f"{type(error).__name__}: {error}".split())  # messages of libheif end with a newline
    return f"it is damaged or truncated ({detail}). Copy, download or export it again.", "image_damaged"


def _decode(file: BinaryIO, mode: Mode, min_size: tuple[int, int] | None, max_pixels: int) -> Image.Image:
    codec = find_codec(file.read(BRANDS_SIZE))
    file.seek(0)
    if codec == "HEIC":
        return to_mode(_decode_heic(file, max_pixels), mode)
    if codec == "AVIF" and not features.check("avif"):
        reason = "the installed Pillow was built without AVIF. Install a wheel of Pillow, or convert the image to JPEG."
        raise ImageError(reason, code="image_unsupported")
    try:
        header = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        if codec != "AVIF":
            raise
        reason = "it is a damaged or truncated AVIF file. Copy, download or export it again."
        raise ImageError(reason, code="image_damaged") from error
    width, height = header.size
    _check_num_pixels(width, height, max_pixels)
    if header.format in ("JPEG", "MPO"):  # MPO: several JPEGs in one file, from some cameras
        _check_num_scans(file)
        orientation = _orientation(header)
        scale = _choose_scale(height, width, orientation, min_size)
        image = _decode_simplejpeg(header, file, scale) or _decode_pillow(header, scale)
        # Avoid a copy if no conversion is needed: at 12 megapixels it is a third of the time.
        converted = image if image.mode == mode and image is not header else to_mode(image, mode)
    else:
        header.load()
        orientation = _orientation(header)  # after load(): PNG may store EXIF after the pixels
        converted = to_mode(header, mode)
    return converted.transpose(_TRANSPOSES[orientation]) if orientation in _TRANSPOSES else converted


def _check_num_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(
            f"it has {width} x {height} pixels, more than the {max_pixels:,} allowed. Shrink it, or raise max_pixels.",
            code="image_too_large",
        )


def _decode_heic(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Decode with pi-heif, which is imported here because few programs need it, and not registered in Pillow.

    The result is upright: HEIF has its own rotation, which libheif applies. That of EXIF only repeats it.
    """
    data = file.read()
    try:
        import pi_heif

        check_heic(data, max_pixels)
        heif = pi_heif.open_heif(data)  # reads the metadata only
        if not (len(heif) and heif.info["primary"]):  # pi-heif leaves out what libheif cannot decode
            raise SyntaxError("its main image has another codec than HEVC, or is hidden")
        if heif.mode not in ("RGB", "RGBA", "RGBa", "L"):
            # pi-heif writes beyond the pixels if they have fewer bits than the file says.
            raise SyntaxError("it is grayscale with more than 8 bits")
        width, height = heif.size
        _check_num_pixels(width, height, max_pixels)
        image: Image.Image = heif.to_pillow()
    except ImportError as error:
        reason = f"HEIC needs the package pi-heif: {how_to_install('heic')}."
        raise ImageError(reason, code="image_unsupported") from error
    except (SyntaxError, RuntimeError) as error:  # by these, pi-heif means that libheif lacks a feature, or refuses
        reason = f"HEIF files of its kind are not supported ({' '.join(str(error).split())}). Convert it to JPEG."
        raise ImageError(reason, code="image_unsupported") from error
    return image


def _check_num_scans(file: BinaryIO) -> None:
    """Refuse a progressive JPEG with too many scans: each is a pass over all pixels (a denial-of-service attack)."""
    file.seek(0)
    scans = file.read().count(b"\xff\xda")
    if scans > MAX_SCANS:
        reason = f"it has {scans:,} scans, more than the {MAX_SCANS} allowed. Save it again."
        raise ImageError(reason, code="image_unsupported")


def _orientation(image: Image.Image) -> int:
    try:
        orientation: int = image.getexif().get(_ORIENTATION_TAG, 1)
        return orientation
    except Exception:  # damaged metadata is no reason to refuse the image; Pillow raises many types
        return 1


def _choose_scale(height: int, width: int, orientation: int, min_size: tuple[int, int] | None) -> int:
    """Return the largest of 8, 4, 2, 1 by which the image may be reduced.

    It must divide both sides, as with nearly all camera sizes. Otherwise the decoder rounds the size up, the aspect
    ratio changes slightly, and a later crop can shift by a pixel (mean difference 8 gray levels instead of 1).
    """
    if min_size is None:
        return 1
    rows, columns = reversed(min_size) if orientation in _SIDEWAYS else min_size
    for scale in (8, 4, 2):
        divides = height % scale == 0 and width % scale == 0
        if divides and height >= DECODE_MARGIN * rows * scale and width >= DECODE_MARGIN * columns * scale:
            return scale
    return 1


def _decode_simplejpeg(header: Image.Image, file: BinaryIO, scale: int) -> Image.Image | None:
    """Decode with simplejpeg: same library and pixels as Pillow, but without the GIL; None if it refuses."""
    if header.mode not in ("RGB", "L"):
        return None  # simplejpeg does not convert CMYK
    height, width = header.height // scale, header.width // scale
    file.seek(0)
    data = file.read()
    try:
        # Both parsers must agree on the size: otherwise a file could declare a small size to Pillow and make simplejpeg
        # allocate gigabytes.
        if simplejpeg.decode_jpeg_header(data, min_height=height, min_width=width)[:2] != (height, width):
            return None
        space = "RGB" if header.mode == "RGB" else "GRAY"
        pixels = simplejpeg.decode_jpeg(data, colorspace=space, min_height=height, min_width=width)
    except ValueError:
        return None  # strict mode refuses what libjpeg only warns about; Pillow decides
    return Image.fromarray(pixels if space == "RGB" else np.squeeze(pixels, axis=2))


def _decode_pillow(header: Image.Image, scale: int) -> Image.Image:
    if scale > 1:
        header.draft(header.mode, (header.width // scale, header.height // scale))
    header.load()
    return header


def _composite_on_white(image: Image.Image) -> Image.Image:
    # La and RGBa (premultiplied) can be converted to RGBA only through LA and RGBA.
    image = image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode))
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Convert the modes I;16 (all byte orders), I and F to L."""
    values = np.asarray(image)
    white = 1.0 if image.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= white):  # also refuses NaN
        raise ImageError(
            f"its pixels range from {values.min()} to {values.max()}, so the white level is unknown. "
            f"Convert it to 8 bits, or scale it to 0..{white:.0f}.",
            code="image_unsupported",
        )
    return Image.fromarray((values * (255 / white) + 0.5).astype(np.uint8))
