"""Lines for a terminal: spans of text with colors, which no one needs to read them.

A color reads on light and on dark grounds; without any, letters and marks say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from echelon.core.svg import fill, plain

WIDTH = 80
"""No line has more columns."""


@dataclass(frozen=True, slots=True)
class Span:
    """Hold some text and its color (six digits), "" for none."""

    text: str
    color: str = ""


Line = tuple[Span, ...]


def ink(hue: float, saturation: float = 0.6) -> str:
    """Return the color of a hue for marks in a terminal."""
    return fill(hue, 0.5, saturation)


def joined(lines: Iterable[Line]) -> str:
    """Return lines as text without colors, each with its end."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


def columns(text: str) -> int:
    """Return how many columns of a terminal `text` takes."""
    return cell_len(text)


def cut(text: str, most: int) -> str:
    """Return `text` on one line of at most `most` columns; dots stand for what is left out."""
    text = plain(text)
    if cell_len(text) <= most:
        return text
    return set_cell_size(text, max(most - 2, 0)) + ".." if most > 2 else set_cell_size(text, most)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` with blanks up to `width` columns, before it if it is to stand right."""
    blanks = " " * max(width - cell_len(text), 0)
    return blanks + text if right else text + blanks


def table_lines(
    rows: Sequence[Sequence[str]], *, right: Sequence[bool], most_first: int = 40
) -> list[Line]:
    """Return rows in aligned columns, as wide as they must be; `right` columns stand right."""
    cells = [[cut(row[0], most_first), *row[1:]] for row in rows]
    widths = [max((columns(row[place]) for row in cells), default=0) for place in range(len(right))]
    return [
        (
            Span(
                "  ".join(
                    padded(cell, width, right=to_right)
                    for cell, width, to_right in zip(row, widths, right, strict=True)
                ).rstrip()
            ),
        )
        for row in cells
    ]
