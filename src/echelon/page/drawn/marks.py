# SPDX-License-Identifier: Apache-2.0
"""The parts of drawings: boxes, lines, words and keys, and a drawing as a file or inside of HTML.

Words have the color of the text around them (`currentColor`), faint ones less of it; boxes have the
page's palette, whose fills read on light and on dark paper. There are no classes, ids or style
sheets inside of a drawing: several may stand in one notebook, and change nothing around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Literal, TypeAlias

from echelon.core.svg import number, plain, text_width

PAGE = 760
"""The pixels of a drawing's width."""
TEXT = 12  # pixels
SMALL = 10  # pixels
FAINT = 'fill-opacity="0.72"'
"""The look of words that matter less."""
STRONG = 'font-weight="600"'
"""The look of words that matter most."""
TINTS = (
    *("#56b4e9", "#e69f00", "#3fbf95", "#d98bb6", "#f0e442", "#4a90c8"),
    *("#e07b39", "#9aa0a8", "#b4a7d6", "#a6cf6b", "#c58b62", "#7fd1d8"),
)
"""The fills of kinds: those of the page's style sheet, `--k0` to `--k11`."""
TONES = {"compute": "#0072b2", "communication": "#b86e00", "idle": "#9aa0a8"}
"""The fill of each tone of a step's seconds."""
INK = "#10131a"
"""The color of words on a fill."""
ACCENT = "#3b86d0"
BAD = "#d1432b"
_FONT = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', "
    "'DejaVu Sans', 'Noto Sans', sans-serif"
)
_EDGE = 14  # pixels of paper around a drawing in a file
_BETWEEN = 16  # pixels between the entries of a key
_LINE = 18  # pixels of a line of a key

Anchor: TypeAlias = Literal["start", "middle", "end"]
Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Hold a figure as marks on `width` x `height` pixels, with its name and what it shows."""

    name: str
    description: str
    width: float
    height: float
    body: tuple[str, ...]


def svg_file(drawing: Drawing, *, follows_page: bool = True) -> str:
    """Return a drawing as an SVG file on paper of its own, light or, where the page is so, dark.

    With `follows_page` false it is always light, and without a rule that some readers do not know.
    """
    dark = (
        "@media (prefers-color-scheme: dark) {\n  svg { color: #e8eaed; }\n"
        "  .paper { fill: #14171c; }\n}\n"
    )
    edge = number(-_EDGE)
    size = f'width="{number(drawing.width + 2 * _EDGE)}"'
    size += f' height="{number(drawing.height + 2 * _EDGE)}"'
    paper = f'x="{edge}" y="{edge}" {size} fill="#ffffff"'
    head = _head(drawing, edge=_EDGE)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {head} color="#1b1f24">']
    lines += [*_told(drawing)]
    if follows_page:
        lines.append(f"<style>\n{dark}</style>")
    lines += [f'<rect class="paper" {paper}/>', *drawing.body, "</svg>"]
    return "\n".join(lines) + "\n"


def svg_inside(drawing: Drawing) -> str:
    """Return a drawing as a piece of an HTML page, in the colors of the text around it."""
    style = 'style="max-width: 100%; height: auto"'
    return "\n".join([f"<svg {_head(drawing)} {style}>", *drawing.body, "</svg>"])


def _head(drawing: Drawing, edge: float = 0) -> str:
    width, height = number(drawing.width + 2 * edge), number(drawing.height + 2 * edge)
    size = f'width="{width}" height="{height}"'
    view = f'viewBox="{number(-edge)} {number(-edge)} {width} {height}"'
    told = escape(plain(drawing.name), quote=True)
    look = f'font-family="{_FONT}" font-size="{TEXT}" fill="currentColor"'
    return f'{size} {view} role="img" aria-label="{told}" {look}'


def _told(drawing: Drawing) -> Iterator[str]:
    yield f"<title>{escape(plain(drawing.name))}</title>"
    if drawing.description:
        yield f"<desc>{escape(plain(drawing.description))}</desc>"


def finite(value: float | None) -> float:
    """Return a number to draw: 0 for what is none."""
    return float(value) if value is not None and isfinite(value) else 0.0


def box(at: Box, fill: str, *, tip: str = "", faint: float = 1.0) -> str:
    """Return a filled box; `tip` is shown where a pointer rests on it."""
    x, y, width, height = map(number, at)
    less = "" if faint >= 1 else f' fill-opacity="{number(faint)}"'
    mark = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"{less}'
    return f"{mark}><title>{escape(plain(tip))}</title></rect>" if tip else f"{mark}/>"


def empty(at: Box) -> str:
    """Return the ground that boxes stand on."""
    return box(at, "currentColor", faint=0.08)


def stroke(
    x: float,
    y: float,
    to: tuple[float, float],
    *,
    color: str = "currentColor",
    width: float = 1,
    dashes: str = "",
) -> str:
    """Return a line from (`x`, `y`) to a place."""
    ends = f'x1="{number(x)}" y1="{number(y)}" x2="{number(to[0])}" y2="{number(to[1])}"'
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line {ends} stroke="{color}" stroke-width="{number(width)}"{dashed}/>'


def words(
    x: float, y: float, said: str, *, anchor: Anchor = "start", size: float = TEXT, look: str = ""
) -> str:
    """Return words on the base line `y`; `look` is `FAINT`, `STRONG`, `colored(...)`, or both."""
    marks = [f'x="{number(x)}" y="{number(y)}"']
    marks += [f'text-anchor="{anchor}"'] * (anchor != "start")
    marks += [f'font-size="{number(size)}"'] * (size != TEXT)
    marks += [look] * (look != "")
    return f"<text {' '.join(marks)}>{escape(plain(said))}</text>"


def colored(fill: str) -> str:
    """Return the look of words that have a color of their own."""
    return f'fill="{fill}"'


def shortened(said: str, width: float, size: float = TEXT) -> str:
    """Return words, or as many of their first characters as `width` pixels hold, with dots."""
    if text_width(said, size) <= width:
        return said
    # What is far too long is cut first: names in the files of a run may have any length.
    kept = said[: max(int(width / (0.3 * size)), 1)]
    while kept and text_width(kept + "..", size) > width:
        kept = kept[:-1]
    return kept + ".."


def wrapped(said: str, width: float, *, most: int = 6) -> list[str]:
    """Return words as lines of at most `width` pixels, `most` of them; the last may be cut."""
    lines, left = [""], said.split()
    for place, word in enumerate(left):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, TEXT) <= width or not lines[-1]:
            lines[-1] = shortened(longer, width)
        elif len(lines) == most:
            rest = " ".join([lines[-1], *left[place : place + 40]])
            lines[-1] = shortened(rest, width)
            break
        else:
            lines.append(shortened(word, width))
    return lines


def paragraph(said: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """Return faint words in lines from the top `y`, and where they end."""
    lines = wrapped(said, width)
    drawn = [words(x, y + 12 + 16 * at, one, look=FAINT) for at, one in enumerate(lines)]
    return drawn, y + 16 * len(lines) + 4


def key(entries: Iterable[tuple[str, str]], *, top: float) -> tuple[list[str], float]:
    """Return the key to fills, (fill, meaning) beside one another, and where it ends."""
    drawn: list[str] = []
    x, y = 0.0, top
    for fill, meaning in entries:
        shown = shortened(meaning, PAGE - 40)
        width = 18 + text_width(shown, TEXT)
        if x > 0 and x + width > PAGE:
            x, y = 0.0, y + _LINE
        drawn += [box((x, y + 2, 12, 12), fill), words(x + 18, y + 12, shown)]
        x += width + _BETWEEN
    return drawn, (y + _LINE + 6 if drawn else top)


def widest(texts: Sequence[str], size: float = TEXT) -> float:
    """Return the pixels of the longest of some texts; 0 without one."""
    return max((text_width(one, size) for one in texts), default=0.0)
