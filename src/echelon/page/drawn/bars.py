# SPDX-License-Identifier: Apache-2.0
"""Bars of parts beside a limit, the waterfall of a step, and a grid of cells."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from echelon.core.svg import text_width
from echelon.page.drawn.marks import (
    BAD,
    INK,
    PAGE,
    SMALL,
    STRONG,
    TINTS,
    TONES,
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
from echelon.planner.view.document import BarRow, BarsFigure, HeatFigure, HeatRow, WaterfallFigure

ROW = 26  # pixels
HIGH = 20  # pixels of a bar
_LABEL = 170  # pixels of a row's label, at most

_SHARE = 60  # pixels
_ROW = 26  # pixels
_WIDEST = 96  # pixels of a cell
_DARK = 0.55  # share of the most from which words of a cell are dark
_HEAT_LABEL = 200  # pixels of a row's label, at least, where there are many columns


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


def draw_waterfall(found: WaterfallFigure, name: str, says: str) -> Drawing:
    """Return the drawing of a step's seconds, its total with the band of measured runs last."""
    names = {one.tone: one.name for one in found.tones}
    tones = dict.fromkeys(part.tone for row in found.rows for part in row.parts)
    body, top = key([(TONES[tone], names[tone]) for tone in tones], top=0)
    rows = [(row.label, row.text, row.share_text) for row in found.rows]
    left, right = columns([*rows, ("step", found.total_text, "")])
    scale = (right - left) / (max(finite(found.high), finite(found.total)) or 1.0)
    for place, row in enumerate(found.rows):
        x, y = left + finite(row.start) * scale, top + ROW * place
        body += [*row_words(rows[place], y), empty((left, y, right - left, HIGH))]
        for part in row.parts:
            width = finite(part.seconds) * scale
            tip = f"{row.label}: {row.text}, {names[part.tone]}"
            body.append(box((x, y, width, HIGH), TONES[part.tone], tip=tip))
            x += width
    y = top + ROW * len(rows) + 6
    low, high = left + finite(found.low) * scale, left + finite(found.high) * scale
    total = left + finite(found.total) * scale
    body += [
        stroke(0, y - 4, (PAGE, y - 4)),
        *row_words(("step", found.total_text, ""), y, look=STRONG),
        empty((left, y, right - left, HIGH)),
        box((low, y + 5, max(high - low, 0), HIGH - 10), "currentColor", faint=0.35),
        stroke(total, y - 2, (total, y + HIGH + 2), width=2),
    ]
    said = f"The faint bar is where four of five measured runs lie: {found.band_text}."
    drawn, bottom = paragraph(said, 0, y + ROW, PAGE)
    return Drawing(name=name, description=says, width=PAGE, height=bottom, body=(*body, *drawn))


def draw_heat(found: HeatFigure, name: str, says: str) -> Drawing:
    """Return the drawing of a grid; a pointer on a cell shows its row, column and number."""
    count = max(len(found.columns), 1)
    room = max(_HEAT_LABEL, PAGE - count * _WIDEST - 10)
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
