# SPDX-License-Identifier: Apache-2.0
"""The parts of every SVG figure: boxes, lines and texts, on light and on dark pages.

A figure needs nothing from outside, and names may hold what they like: what XML does not allow is
left out. Boxes keep their colors on light and on dark pages (dark text on a light fill reads on
both); page, text and lines change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from colorsys import hls_to_rgb
from html import escape
from unicodedata import east_asian_width

_LIGHT = """\
text { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.page { fill: #ffffff; }
.title { font-size: 14px; font-weight: 600; fill: #1c2128; }
.rank { font-size: 12px; fill: #444c56; text-anchor: end; }
.tick { font-size: 11px; fill: #444c56; text-anchor: middle; }
.key { font-size: 12px; fill: #444c56; }
.label { fill: #14181d; text-anchor: middle; }
.axis { stroke: #8b949e; stroke-width: 1; }
.idle { fill: #eef0f2; }
.box { stroke: #ffffff; stroke-width: 0.75; }
"""

_DARK = """\
  .page { fill: #0d1117; }
  .title { fill: #e6edf3; }
  .rank, .tick, .key { fill: #b1bac4; }
  .idle { fill: #1c222b; }
  .box { stroke: #0d1117; }
"""

_KEY_SIZE = 12  # pixels of text
_KEY_BOX = 15  # pixels
_NARROW = frozenset("iljtfrI.,:;|!'`()[]/\\- ")
_WIDE = frozenset("mwMW%@+=<>#&^~")


def style(light: str = "", dark: str = "") -> str:
    """Return the rules of a figure: those of all figures, then `light`; `dark` on dark pages."""
    return f"{_LIGHT}{light}@media (prefers-color-scheme: dark) {{\n{_DARK}{dark}}}\n"


def figure(
    body: Iterable[str],
    *,
    name: str,
    rules: str,
    width: float,
    height: float,
    description: str = "",
) -> str:
    """Return a whole figure of `width` x `height` pixels, with the name that readers are told."""
    told = escape(plain(name), quote=True)
    size = f'width="{number(width)}" height="{number(height)}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{told}">'
    )
    parts = [head, f"<title>{told}</title>"]
    if description:
        parts.append(f"<desc>{escape(plain(description))}</desc>")
    parts.append(f"<style>\n{rules}</style>")
    parts.append(f'<rect class="page" {size}/>')
    return "\n".join([*parts, *body, "</svg>"]) + "\n"


def rect(name: str, x: float, y: float, width: float, height: float, tip: str = "") -> str:
    """Return a box of class `name`; `tip` is shown where a pointer rests on it."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    if not tip:
        return f'<rect class="{name}" {place}/>'
    return f'<rect class="{name}" {place}><title>{escape(plain(tip))}</title></rect>'


def line(x: float, y: float, to_x: float, to_y: float, name: str = "axis") -> str:
    """Return a line of class `name`."""
    start, end = f'x1="{number(x)}" y1="{number(y)}"', f'x2="{number(to_x)}" y2="{number(to_y)}"'
    return f'<line class="{name}" {start} {end}/>'


def text(x: float, y: float, words: str, name: str, size: float | None = None) -> str:
    """Return a text of class `name` on the base line `y`."""
    scaled = "" if size is None else f' font-size="{number(size)}"'
    at = f'x="{number(x)}" y="{number(y)}"'
    return f'<text class="{name}" {at}{scaled}>{escape(plain(words))}</text>'


def text_width(words: str, size: float) -> float:
    """Return a width that `words` do not exceed in any of the fonts of the style."""
    return size * sum(_width(char) for char in plain(words))


def key(
    entries: Iterable[tuple[Sequence[str], str]],
    *,
    left: float,
    right: float,
    top: float,
    thin: Collection[str] = (),
) -> tuple[list[str], float]:
    """Return the key to boxes, and where it ends: (classes, meaning) beside one another.

    What would reach over `right` goes on in a new line. Boxes of classes in `thin` are lines.
    """
    drawn: list[str] = []
    x, y = left, top
    for classes, meaning in entries:
        boxes = _KEY_BOX * len(classes)
        width = boxes + 5 + text_width(meaning, _KEY_SIZE)
        if x > left and x + width > right:
            x, y = left, y + 20
        for place, name in enumerate(classes):
            down, height = (y + 5, 4) if name in thin else (y, 14)
            drawn.append(rect(name, x + _KEY_BOX * place, down, 14, height))
        drawn.append(text(x + boxes + 5, y + 11.5, meaning, "key"))
        x += width + 12
    return drawn, y + 14


def fill(hue: float, light: float, saturation: float = 0.72) -> str:
    """Return the color of a hue (in degrees) and a lightness (0 to 1)."""
    red, green, blue = hls_to_rgb(hue / 360, light, saturation)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def plain(words: str) -> str:
    """Return `words` without the control characters that XML does not allow."""
    return "".join(char if char.isprintable() else " " for char in words)


def number(value: float) -> str:
    """Return a length with two digits behind the point at most."""
    shown = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if shown == "-0" else shown


def _width(char: str) -> float:
    if char in _NARROW:
        return 0.42
    if char in _WIDE or not char.isascii():
        return 1.3 if east_asian_width(char) in "WF" else 1.0
    return 0.8 if char.isupper() else 0.66
