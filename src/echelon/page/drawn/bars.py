# SPDX-License-Identifier: Apache-2.0
"""Bars of parts, one over the other, beside a limit: lengths are shares of the longest."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.page.drawn.marks import (
    BAD,
    PAGE,
    TINTS,
    Drawing,
    box,
    colored,
    empty,
    finite,
    key,
    paragraph,
    shortened,
    stroke,
    widest,
    words,
)
from echelon.page.figures import BarRow, BarsFigure

ROW = 26  # pixels
HIGH = 20  # pixels of a bar
_LABEL = 170  # pixels of a row's label, at most


def draw_bars(found: BarsFigure, name: str, says: str) -> Drawing:
    """Return the drawing of bars; a pointer on a part shows its kind and value."""
    used = [any(_value(row, place) > 0 for row in found.rows) for place in range(len(found.kinds))]
    entries = [(tint(place), kind) for place, kind in enumerate(found.kinds) if used[place]]
    body, top = key(entries, top=0)
    left, right = columns([(row.label, row.total_text, row.share_text) for row in found.rows])
    totals = [finite(row.total) for row in found.rows]
    scale = (right - left) / (max([finite(found.limit), *totals], default=0.0) or 1.0)
    for place, row in enumerate(found.rows):
        y = top + ROW * place
        body += row_words((row.label, row.total_text, row.share_text), y, over=row.over)
        body += [empty((left, y, right - left, HIGH)), *_parts(found, row, (left, y), scale)]
        if found.limit > 0:
            x = left + found.limit * scale
            body.append(stroke(x, y - 3, (x, y + HIGH + 3), width=2))
    bottom = top + ROW * len(found.rows)
    if found.limit > 0:
        said = f"The line is the memory of a device: {found.limit_text}."
        drawn, bottom = paragraph(said, 0, bottom, PAGE)
        body += drawn
    return Drawing(name=name, description=says, width=PAGE, height=bottom, body=tuple(body))


def tint(place: int) -> str:
    """Return the fill of the kind at a place."""
    return TINTS[place % len(TINTS)]


def columns(rows: list[tuple[str, str, str]]) -> tuple[float, float]:
    """Return where bars begin and end, between the labels of rows and their values and shares."""
    label = min(widest([one for one, _, _ in rows]), _LABEL)
    value = widest([one for _, one, _ in rows])
    return label + 10, PAGE - min(value, 160) - _SHARE - 20


_SHARE = 60  # pixels


def row_words(
    said: tuple[str, str, str], y: float, *, over: bool = False, look: str = ""
) -> list[str]:
    """Return the label, the value and the share of a row."""
    beside = colored(BAD) if over else look
    label, value, share = said
    return [
        words(0, y + 14, shortened(label, _LABEL), look=look),
        words(PAGE - _SHARE - 10, y + 14, value, anchor="end", look=beside),
        words(PAGE, y + 14, share, anchor="end", look=beside),
    ]


def _parts(found: BarsFigure, row: BarRow, at: tuple[float, float], scale: float) -> Iterator[str]:
    x, y = at
    for place, kind in enumerate(found.kinds):
        value = _value(row, place)
        if value > 0:
            tip = f"{row.label}: {kind} {row.texts[place]}"
            yield box((x, y, value * scale, HIGH), tint(place), tip=tip)
            x += value * scale


def _value(row: BarRow, place: int) -> float:
    return finite(row.values[place]) if place < len(row.values) else 0.0
