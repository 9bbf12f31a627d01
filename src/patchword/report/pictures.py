"""Pictures inside the page: the hardest mistakes, each with what it was and what the model said."""

import base64
import io

import numpy as np
from PIL import Image

from .content import Graded, Mistake
from .text import escape, name, percent

MOST_MISTAKES = 36
LARGEST = 240  # pixels of the longer side; keeps a page of photographs below a megabyte
SMALL = 96  # up to here pixels are kept exactly, and shown as squares


def data_uri(picture: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **({"quality": 82} if kind == "JPEG" else {"compress_level": 6}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def mistakes_grid(report: Graded) -> str:
    return f'<div class="mistakes">{"".join(map(card, report.mistakes[:MOST_MISTAKES]))}</div>'


def card(mistake: Mistake) -> str:
    picture = as_picture(mistake.image)
    small = max(picture.size) <= SMALL
    if not small:
        picture.thumbnail((LARGEST, LARGEST))
    source = data_uri(picture, "PNG" if small else "JPEG")
    look = ' class="crisp"' if small else ""
    alt = escape(f"{mistake.true}, taken for {mistake.predicted}")
    return f"""<figure><div><img{look} src="{source}" alt="{alt}"></div>
<p>was <b>{name(mistake.true, 60)}</b></p><p>said <b class="said">{name(mistake.predicted, 60)}</b>
({percent(mistake.probability, 0)})</p><p class="file">{name(mistake.name, 56)}</p></figure>
"""


def as_picture(pixels: np.ndarray) -> Image.Image:
    """uint8 (h, w, 1), (h, w, 3) or (h, w)."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(pixels))
