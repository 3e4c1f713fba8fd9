# SPDX-License-Identifier: Apache-2.0
"""Values over the steps of a run, one line for each series, and what was planned as a level."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.page.drawn.axis import DrawnAxis, can_be_drawn, step_axis, value_axis
from echelon.page.drawn.bars import tint
from echelon.page.drawn.marks import (
    ACCENT,
    FAINT,
    PAGE,
    SMALL,
    Drawing,
    key,
    stroke,
    words,
)
from echelon.page.figures import LinesFigure

_HIGH = 210  # pixels of the lines
_LEFT = 64  # pixels of the names of marks
_RIGHT = PAGE - 24  # pixels


def draw_lines(found: LinesFigure, name: str, says: str) -> Drawing:
    """Return the drawing of lines; a step without a value breaks a line that is not joined."""
    entries = [(tint(place), one.name) for place, one in enumerate(found.series)]
    if found.planned is not None:
        entries.append((ACCENT, f"planned: {found.planned_text}"))
    body, top = key(entries, top=0)
    top += 14
    bottom = top + _HIGH
    values = [one for one in _values(found) if can_be_drawn(one)]
    up = value_axis(min(values, default=0.0), max(values, default=1.0), found.unit)
    along = step_axis(found.steps[0], found.steps[-1]) if found.steps else step_axis(0, 1)
    body += _frame(up, along, top, bottom)
    for place, one in enumerate(found.series):
        x = [along.place(step, _LEFT, _RIGHT) for step in found.steps]
        y = [
            up.place(value, bottom, top) if value is not None and can_be_drawn(value) else None
            for value in one.values
        ]
        points = [at for at in zip(x, y, strict=True) if at[1] is not None or not one.joined]
        if path := _path(points):
            line = f'stroke="{tint(place)}" stroke-width="1.8" stroke-linecap="round"'
            body.append(f'<path d="{path}" fill="none" {line}/>')
    if found.planned is not None and can_be_drawn(found.planned):
        level = up.place(found.planned, bottom, top)
        body.append(stroke(_LEFT, level, (_RIGHT, level), color=ACCENT, width=1.5, dashes="6 4"))
    return Drawing(name=name, description=says, width=PAGE, height=bottom + 24, body=tuple(body))


def _values(found: LinesFigure) -> Iterable[float]:
    for one in found.series:
        yield from (value for value in one.values if value is not None)
    if found.planned is not None:
        yield found.planned


def _frame(up: DrawnAxis, along: DrawnAxis, top: float, bottom: float) -> list[str]:
    """Return the marks of both axes, and the unit of the values."""
    body = [words(_LEFT, top - 5, up.unit, size=SMALL, look=FAINT)]
    for value, said in up.marks:
        y = up.place(value, bottom, top)
        grid = f'x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        body.append(f'<line {grid} stroke="currentColor" stroke-opacity="0.18"/>')
        body.append(words(_LEFT - 6, y + 4, said, anchor="end", size=SMALL, look=FAINT))
    for value, said in along.marks:
        x = along.place(value, _LEFT, _RIGHT)
        body.append(words(x, bottom + 16, said, anchor="middle", size=SMALL, look=FAINT))
    return body


def _path(points: Iterable[tuple[float, float | None]]) -> str:
    """Return a path through points, with a gap at each that has none; one alone is a dot."""
    text, pen, alone = list[str](), "M", False
    for x, y in points:
        if y is None:
            text += ["h0.01"] * alone
            pen, alone = "M", False
            continue
        alone = pen == "M"
        text.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join([*text, *["h0.01"] * alone])
