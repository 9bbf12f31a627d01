"""Badges of the README, as plain SVG files: the page loads nothing from other hosts."""

from pathlib import Path
from xml.sax.saxutils import escape

HEIGHT, PADDING, CHARACTER = 20, 8, 6.6  # pixels
BADGES = {
    "images/badge_python.svg": ("python", "3.11+", "#2f74d0"),
    "images/badge_torch.svg": ("pytorch", "2.10+", "#b8501a"),
    "images/badge_license.svg": ("license", "Apache-2.0", "#1a7a50"),
    "images/badge_offline.svg": ("telemetry", "none", "#7a45b0"),
}


def write_badge(output: str, path: Path) -> None:
    """Write a badge: a name on gray, a value on a color."""
    name, value, color = BADGES[output]
    left, right = (round(len(text) * CHARACTER) + 2 * PADDING for text in (name, value))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" role="img">\n'
        f"<title>{escape(name)}: {escape(value)}</title>\n"
        f'<clipPath id="r"><rect width="{left + right}" height="{HEIGHT}" rx="3"/></clipPath>\n'
        f'<g clip-path="url(#r)"><rect width="{left}" height="{HEIGHT}" fill="#444c56"/>'
        f'<rect x="{left}" width="{right}" height="{HEIGHT}" fill="{color}"/></g>\n'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">\n'
        f"{label(name, left / 2, left)}\n{label(value, left + right / 2, right)}\n</g>\n</svg>\n"
    )


def label(text: str, center: float, width: int) -> str:
    """A text of fixed length, whatever fonts the reader has."""
    return f'<text x="{center:g}" y="14" textLength="{width - 2 * PADDING}">{escape(text)}</text>'
