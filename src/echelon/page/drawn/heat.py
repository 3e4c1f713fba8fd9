# SPDX-License-Identifier: Apache-2.0
"""A grid of cells, darker where the value is larger; a cell that is wide enough says its number."""

from __future__ import annotations

from math import isfinite

from echelon.core.svg import text_width
from echelon.page.drawn.marks import (
    INK,
    PAGE,
    SMALL,
    TINTS,
    Drawing,
    box,
    colored,
    empty,
    paragraph,
    shortened,
    widest,
    words,
)
from echelon.page.figures import HeatFigure, HeatRow

_ROW = 26  # pixels
_WIDEST = 96  # pixels of a cell
_DARK = 0.55  # share of the most from which words of a cell are dark
_LABEL = 200  # pixels of a row's label, at least, where there are many columns


def draw_heat(found: HeatFigure, name: str, says: str) -> Drawing:
    """Return the drawing of a grid; a pointer on a cell shows its row, column and number."""
    count = max(len(found.columns), 1)
    room = max(_LABEL, PAGE - count * _WIDEST - 10)
    left = min(widest([row.label for row in found.rows]), room) + 10
    wide = min((PAGE - left) / count, _WIDEST)
    every = max(1, int(widest(found.columns, SMALL) / wide) + 1)
    top = 20.0
    body = list[str]()
    for place in range(0, len(found.columns), every):
        said = shortened(found.columns[place], _WIDEST, SMALL)
        middle = left + wide * (place + 0.5)
        if middle + text_width(said, SMALL) / 2 <= PAGE + 4:
            body.append(words(middle, 13, said, anchor="middle", size=SMALL))
    for place, row in enumerate(found.rows):
        body += _cells(found, row, (left, top + _ROW * place), wide)
    drawn, bottom = paragraph(found.legend, 0, top + _ROW * len(found.rows) + 2, PAGE)
    return Drawing(name=name, description=says, width=PAGE, height=bottom, body=(*body, *drawn))


def _cells(found: HeatFigure, row: HeatRow, at: tuple[float, float], wide: float) -> list[str]:
    left, y = at
    body = [words(0, y + 16, shortened(row.label, left - 10))]
    for place, value in enumerate(row.values[: len(found.columns)]):
        x, text = left + wide * place, row.texts[place] if place < len(row.texts) else ""
        body.append(empty((x + 0.5, y, wide - 1, _ROW - 3)))
        share = 0.0
        if value is not None and isfinite(value):
            share = max(0.0, min(1.0, value / (found.most or 1.0)))
            tip = f"{row.label}, {found.columns[place]}: {text}"
            body.append(box((x + 0.5, y, wide - 1, _ROW - 3), TINTS[6], tip=tip, faint=share))
        if text and text_width(text, SMALL) <= wide - 4:
            look = colored(INK) if share > _DARK else ""
            middle = x + wide / 2
            body.append(words(middle, y + 15, text, anchor="middle", size=SMALL, look=look))
    return body
