"""Picture files to 8-bit Pillow images, and nothing but `ImageError` when that fails.

Owns decoding, EXIF orientation, the reduction of every pixel format to RGB or grey, and the limits that hostile files
meet. It does not know what size a model wants (`at_least` is only a hint) nor what becomes of the pixels.

Safe to call from many threads: no state is changed by a call, apart from the warning filters described at
`_keep_pillow_quiet`.
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
from PIL import Image, UnidentifiedImageError

from ..errors import DataError, ImageError

Mode = Literal["RGB", "L"]

# Only what photographs and screenshots come in. Pillow can open some forty formats, and among them are interpreters
# (EPS calls Ghostscript) and decoders that hardly anyone tests.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
IMAGE_SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".apng",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".heic",
        ".heif",
        ".avif",
    ],  # not decoded, but pictures: whoever has them must be told
)

# A picture of this size takes 300 MB as RGB. A few kilobytes of file can announce a thousand times as much.
MAX_PIXELS = 100_000_000
MAX_SCANS = 500  # of a JPEG; programs write a dozen at most

# How much larger than `at_least` a JPEG must still be when it is decoded at reduced scale. The decoder's own shrinking
# is cruder than Pillow's, and this margin hides it. Measured on 250 ImageNet pictures (sides cut to multiples of 8),
# shrunk to exactly 1/GAP of the decoded size by Preprocess.resize_and_crop, against the same from a full decode: mean difference
# 0.5, 0.6, 0.7 grey levels at scale 1/2, 1/4, 1/8, the worst picture 2.1, the worst pixel 14. With GAP 2.0: mean 0.8 to
# 1.2, worst picture 2.8, worst pixel 20; with 3.0: mean 0.4 to 0.5, worst picture 1.8, worst pixel 12.
DECODE_MARGIN = 2.5

_ORIENTATION_TAG = 0x0112
_TURNS = {
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
    """Decode a file, or the bytes of one, upright and with 8 bits for each channel. Raises only `ImageError`.

    Of an animation the first frame is taken. See `to_mode` for what becomes of transparency and of deeper pixels.

    Args:
        mode: "RGB" or "L" (grey).
        at_least: (height, width) to which the caller will shrink the picture. A large JPEG may then be decoded at 1/2,
            1/4 or 1/8 of its size, which is several times faster.
        max_pixels: larger pictures are refused before they are decoded. Pillow has a limit of its own, twice
            `PIL.Image.MAX_IMAGE_PIXELS` (179 million); to go beyond it, that has to be raised, too.
        name: what a message calls the image; its path if not given.
    """
    _keep_pillow_quiet()
    name = name or ("<bytes>" if isinstance(source, bytes) else str(source))
    try:
        with _opened(source) as file:
            return _decoded(file, mode, min_size, max_pixels)
    except ImageError as error:
        raise ImageError(error.reason, name=name, code=error.code) from error
    except Exception as error:
        # Pillow's plugins answer damaged files with nearly every exception there is (SyntaxError, struct.error,
        # KeyError, ZeroDivisionError, MemoryError ...), so a list of types would always lack one.
        reason, code = _reason(error)
        raise ImageError(reason, name=name, code=code) from error


def to_mode(image: Image.Image, mode: Mode) -> Image.Image:
    """Any Pillow image as 8-bit RGB or grey, without its metadata.

    Transparent pictures are laid on white: cut-outs and logos are made for a white page, and the colours hidden under
    full transparency are arbitrary, often black. Numbers of 16 bits are divided by 257 (65535 becomes 255), floats are
    multiplied by 255; where they leave 0..65535 or 0..1 nothing says what white is, and `ImageError` is raised.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    elif image.has_transparency_data:
        image = _on_white(image)
    try:
        flat = image.convert(mode)  # a copy where the mode fits already, so what we return never holds a file
    except ValueError as error:  # LAB, for one
        reason = f"its color mode {image.mode} cannot be converted to {mode}. Save it as RGB."
        raise ImageError(reason, code="image_unsupported") from error
    flat.info = {}  # an EXIF orientation that stayed here would be applied a second time by the next reader
    return flat


def list_images(folder: str | Path) -> list[Path]:
    """All picture files below a folder, sorted, chosen by suffix; hidden files and folders are skipped."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder{'' if folder.exists() else ', it does not exist'}. Check the path.")
    files = sorted(_walk(folder))
    if not files:
        raise DataError(f"There are no pictures below {folder}. Files ending in {', '.join(sorted(IMAGE_SUFFIXES))} count.")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Follows links, which data sets are often made of, but enters no real folder twice: links can form circles."""
    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_unreadable):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield Path(parent, name)


def _refuse_unreadable(error: OSError) -> None:
    raise DataError(f"Cannot list {error.filename}: {error.strerror}. Make it readable, or leave it out.") from error


def _keep_pillow_quiet() -> None:
    """Pillow warns of damage in metadata we never use; such a warning must neither be printed nor end the decoding.

    `catch_warnings` in every call would not be thread-safe, so filters are added and stay. They are looked for each
    time because whoever uses `catch_warnings` around us (pytest around each test) takes them away again. Bombs we
    refuse ourselves, so Pillow need not warn of them; but a program with a filter of its own for exactly that warning
    has a reason, and keeps it (if it makes it an error, our caller gets an ImageError).
    """
    if _METADATA_FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    if not any(category is Image.DecompressionBombWarning for _, _, category, _, _ in warnings.filters):
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


_METADATA_FILTER = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)
_keep_pillow_quiet()


def _opened(source: str | Path | bytes) -> BinaryIO:
    if isinstance(source, bytes):
        if not source:
            raise ImageError("it is empty. Was the upload or download cut off?", code="image_empty")
        return io.BytesIO(source)
    status = os.stat(source)
    if stat.S_ISDIR(status.st_mode):
        raise ImageError("it is a folder. Give an image inside it.", code="image_not_a_file")
    if not stat.S_ISREG(status.st_mode):
        # A pipe would block, /dev/zero never end.
        raise ImageError("it is not a regular file. Give an image file.", code="image_not_a_file")
    if status.st_size == 0:
        raise ImageError("it is empty. Was the copy or download cut off?", code="image_empty")
    return open(source, "rb")


def _reason(error: Exception) -> tuple[str, str]:
    """What went wrong and what to do, for someone who only wanted to show an image; and the code of that."""
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return "there is no such file. Check the path.", "image_not_found"
        case PermissionError():
            return "permission is denied. Make the file readable.", "image_permission_denied"
        case UnidentifiedImageError():
            return f"it is not an image in a supported format. Use {', '.join(FORMATS)}.", "image_unsupported"
        case Image.DecompressionBombError() | Image.DecompressionBombWarning():
            return "it has far more pixels than are allowed. Shrink it first.", "image_too_large"
        case MemoryError():
            return "there is not enough memory for it. Shrink it first.", "image_out_of_memory"
    detail = f"{type(error).__name__}: {error}"
    return f"it is damaged or truncated ({detail}). Copy, download or export it again.", "image_damaged"


def _decoded(file: BinaryIO, mode: Mode, min_size: tuple[int, int] | None, max_pixels: int) -> Image.Image:
    header = Image.open(file, formats=FORMATS)
    width, height = header.size
    if width * height > max_pixels:
        raise ImageError(
            f"it has {width} x {height} pixels, more than the {max_pixels:,} allowed. Shrink it, or raise max_pixels.",
            code="image_too_large",
        )
    if header.format in ("JPEG", "MPO"):  # MPO: several JPEGs in one file, as stereo and some telephone cameras write
        _require_few_scans(file)
        orientation = _orientation(header)
        scale = _scale(height, width, orientation, min_size)
        image = _fast_jpeg(header, file, scale) or _pillow_jpeg(header, scale)
        # What needs no conversion is not copied: at 12 megapixels that is a third of the time.
        flat = image if image.mode == mode and image is not header else to_mode(image, mode)
    else:
        header.load()
        orientation = _orientation(header)  # only now: PNG may keep its EXIF behind the pixels
        flat = to_mode(header, mode)
    return flat.transpose(_TURNS[orientation]) if orientation in _TURNS else flat


def _require_few_scans(file: BinaryIO) -> None:
    """A progressive JPEG may have a thousand times as many scans as any program writes, each a pass over all pixels."""
    file.seek(0)
    scans = file.read().count(b"\xff\xda")
    if scans > MAX_SCANS:
        reason = f"it has {scans:,} scans, more than the {MAX_SCANS} allowed. Save it again."
        raise ImageError(reason, code="image_unsupported")


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # broken metadata are no reason to refuse a good picture; Pillow raises all sorts here as well
        return 1


def _scale(height: int, width: int, orientation: int, min_size: tuple[int, int] | None) -> int:
    """The largest of 8, 4, 2, 1 by which the picture may be divided.

    Only divisors of both sides count, as nearly all cameras' sizes allow: otherwise the decoder rounds the size up, the
    proportions change a little, and a later crop can move by a pixel (mean difference 8 grey levels instead of 1).
    """
    if min_size is None:
        return 1
    rows, columns = reversed(min_size) if orientation in _SIDEWAYS else min_size
    for scale in (8, 4, 2):
        divides = height % scale == 0 and width % scale == 0
        if divides and height >= DECODE_MARGIN * rows * scale and width >= DECODE_MARGIN * columns * scale:
            return scale
    return 1


def _fast_jpeg(header: Image.Image, file: BinaryIO, scale: int) -> Image.Image | None:
    """simplejpeg: same library and same pixels as Pillow, yet without holding the GIL; None where it refuses."""
    if header.mode not in ("RGB", "L"):
        return None  # it does not convert CMYK
    height, width = header.height // scale, header.width // scale
    file.seek(0)
    data = file.read()
    try:
        # The two parsers must agree on the size, or a file could show Pillow a small one and have this one allocate
        # gigabytes.
        if simplejpeg.decode_jpeg_header(data, min_height=height, min_width=width)[:2] != (height, width):
            return None
        space = "RGB" if header.mode == "RGB" else "GRAY"
        pixels = simplejpeg.decode_jpeg(data, colorspace=space, min_height=height, min_width=width)
    except ValueError:
        return None  # in strict mode it refuses what libjpeg only warns of; Pillow's verdict counts
    return Image.fromarray(pixels if space == "RGB" else np.squeeze(pixels, axis=2))


def _pillow_jpeg(header: Image.Image, scale: int) -> Image.Image:
    if scale > 1:
        header.draft(header.mode, (header.width // scale, header.height // scale))
    header.load()
    return header


def _on_white(image: Image.Image) -> Image.Image:
    # La and RGBa (premultiplied) convert to RGBA only by way of their plain twins.
    image = image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode))
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Modes I;16 (all byte orders), I and F to L."""
    values = np.asarray(image)
    white = 1.0 if image.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= white):  # written so that NaN is refused as well
        raise ImageError(
            f"its pixels run from {values.min()} to {values.max()}, and nothing says which value is white. "
            f"Convert it to 8 bits, or scale it to 0..{white:.0f}.",
            code="image_unsupported",
        )
    return Image.fromarray((values * (255 / white) + 0.5).astype(np.uint8))
