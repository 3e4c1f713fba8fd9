# SPDX-License-Identifier: Apache-2.0
"""Lines for a terminal: spans of text with colors, which no one needs to read them.

A color reads on light and on dark grounds; without any, letters and marks say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
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


TextLine = tuple[Span, ...]


def mark_color(hue: float, saturation: float = 0.6) -> str:
    """Return the color of a hue for marks in a terminal."""
    return fill(hue, 0.5, saturation)


def truncate_text(text: str, most: int) -> str:
    """Return `text` on one line of at most `most` columns; dots stand for what is left out."""
    text = plain(text)
    if cell_len(text) <= most:
        return text
    return set_cell_size(text, max(most - 2, 0)) + ".." if most > 2 else set_cell_size(text, most)


def pad_text(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` with blanks up to `width` columns, before it if it is to stand right."""
    blanks = " " * max(width - cell_len(text), 0)
    return blanks + text if right else text + blanks


def table_lines(
    rows: Sequence[Sequence[str]], *, right: Sequence[bool], most_first: int = 40
) -> list[TextLine]:
    """Return rows in aligned columns, as wide as they must be; `right` columns stand right."""
    cells = [[truncate_text(row[0], most_first), *row[1:]] for row in rows]
    widths = [
        max((cell_len(row[place]) for row in cells), default=0) for place in range(len(right))
    ]
    return [
        (
            Span(
                "  ".join(
                    pad_text(cell, width, right=to_right)
                    for cell, width, to_right in zip(row, widths, right, strict=True)
                ).rstrip()
            ),
        )
        for row in cells
    ]
