# SPDX-License-Identifier: Apache-2.0
"""Lines over the steps of a run, and pipelines over time, on axes of round numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from echelon.core.svg import text_width
from echelon.core.units import SECOND_UNITS, binary_unit
from echelon.page.drawn.bars import tint
from echelon.page.drawn.marks import (
    ACCENT,
    FAINT,
    INK,
    PAGE,
    SMALL,
    TINTS,
    Drawing,
    colored,
    empty,
    finite,
    key,
    shortened,
    stroke,
    words,
)
from echelon.planner.view.document import LinesFigure, ScheduleChart, ScheduleFigure, ScheduleLane

_HIGH = 210  # pixels of the lines
_LEFT = 64  # pixels of the names of marks
_RIGHT = PAGE - 24  # pixels

MOST = 1e300
"""What is larger than any value that is drawn, in whatever unit."""
_TICKS = 6  # times that are named, but the first
_VALUES = 5  # marks of an axis of values, about
_STEPS = 8  # marks of an axis of steps, about


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnAxis:
    """Hold where values from `low` to `high` lie, and the round ones with their names."""

    low: float
    high: float
    marks: tuple[tuple[float, str], ...]
    unit: str

    def place(self, value: float, begin: float, end: float) -> float:
        """Return where between the pixels `begin` and `end` a value lies."""
        return begin + (end - begin) * (value - self.low) / (self.high - self.low)


def value_axis(low: float, high: float, unit: str) -> DrawnAxis:
    """Return an axis that reaches from a round number to a round number around both values."""
    low, high = _apart(low, high)
    size = 1.0
    if unit == "bytes":
        size, unit = binary_unit(high)
    step = round_step((high - low) / size / _VALUES)
    first, last = floor(low / size / step), ceil(high / size / step)
    marks = _marks(first * step, last * step, step, _named(step))
    return DrawnAxis(
        low=first * step * size,
        high=last * step * size,
        marks=tuple((at * size, said) for at, said in marks),
        unit=unit,
    )


def step_axis(first: int, last: int) -> DrawnAxis:
    """Return an axis of whole steps, which begins and ends with the first and the last."""
    low, high = (float(first), float(last)) if last > first else (first - 0.5, first + 0.5)
    step = max(1.0, round_step((high - low) / _STEPS))
    return DrawnAxis(
        low=low, high=high, marks=_marks(low, high, step, lambda at: f"{at:.0f}"), unit=""
    )


def seconds_text(seconds: float, span: float) -> str:
    """Return seconds with the unit and the digits that a scale of `span` seconds needs."""
    scale, unit = next((one for one in SECOND_UNITS if abs(span) * one[0] >= 1), SECOND_UNITS[0])
    whole = floor(log10(abs(span * scale))) + 1 if span else 1
    return f"{seconds * scale:,.{max(0, 4 - max(1, whole))}f} {unit}"


def can_be_drawn(value: float | None) -> bool:
    """Return whether a value has a place on an axis: it is finite, and sums of such are."""
    return value is not None and -MOST < value < MOST


def round_step(least: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that is no less than `least`."""
    power = 10.0 ** floor(log10(least))
    return next(one * power for one in (1, 2, 5, 10) if one * power >= least * (1 - 1e-9))


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return two numbers that an axis can lie between, near to what was asked for."""
    if not (can_be_drawn(low) and can_be_drawn(high)):
        return 0.0, 1.0
    least = max(abs(low), abs(high)) * 1e-9 or 1e-12
    if high - low >= least:
        return low, high
    around = max(abs(low), abs(high)) * 0.05 or 0.5
    return low - around, high + around


def _marks(
    low: float, high: float, step: float, name: Callable[[float], str]
) -> tuple[tuple[float, str], ...]:
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return tuple((one * step, name(one * step)) for one in range(first, last + 1))


def _named(step: float) -> Callable[[float], str]:
    """Return what names the marks of an axis, with the digits that tell them apart."""
    digits = max(0, -floor(log10(step) + 1e-9))
    if digits > 6 or step >= 1e7:
        return lambda at: "0" if abs(at) < step / 2 else f"{at:.4g}"
    return lambda at: f"{0.0 if abs(at) < step / 2 else at:,.{digits}f}"


def draw_schedule(found: ScheduleFigure, name: str, says: str) -> Drawing:
    """Return the drawing of charts; an action that is wide enough says its microbatch."""
    used = {kind for chart in found.charts for lane in chart.lanes for kind in lane.kinds}
    entries = [(TINTS[one % 4], kind) for one, kind in enumerate(found.kinds) if one in used]
    body, top = key(entries, top=0)
    whole = max((finite(chart.span_s) for chart in found.charts), default=0.0)
    scale = (PAGE - _LEFT) / whole if whole > 0 else 0.0
    for chart in found.charts:
        said = f"{chart.name}: {chart.span_text}; {chart.bubble_text}"
        body.append(words(0, top + 12, shortened(said, PAGE)))
        drawn, top = _chart(chart, top + 20, scale)
        body += [*drawn, *_ticks(whole, top)]
        top += 28
    return Drawing(name=name, description=says, width=PAGE, height=top, body=tuple(body))


def _chart(chart: ScheduleChart, top: float, scale: float) -> tuple[list[str], float]:
    """Return a lane for each rank, its boxes as one path for each kind, and where they end."""
    many = len(chart.lanes)
    high = 10 if many > 32 else 16 if many > 12 else 24
    body, paths = list[str](), dict[int, list[str]]()
    said = list[str]()
    for place, lane in enumerate(chart.lanes):
        y = top + place * high
        if high >= 16 or place % 4 == 0:
            size = SMALL if high >= 16 else 8
            label = shortened(lane.label, _LEFT - 6, size)
            body.append(words(0, y + high / 2 + 3.5, label, size=size, look=FAINT))
        body.append(empty((_LEFT, y + 1, PAGE - _LEFT, high - 2)))
        for kind, microbatch, x, wide in _boxes(lane, scale):
            shape = f"M{x:.2f} {y + 1:.0f}h{wide:.2f}v{high - 2}h-{wide:.2f}z"
            paths.setdefault(kind, []).append(shape)
            number = str(microbatch)
            if high >= 16 and text_width(number, SMALL) <= wide - 3:
                at = x + wide / 2
                said.append(
                    words(
                        at,
                        y + high / 2 + 3.5,
                        number,
                        anchor="middle",
                        size=SMALL,
                        look=colored(INK),
                    )
                )
    body += [
        f'<path d="{"".join(shapes)}" fill="{TINTS[kind % 4]}"/>'
        for kind, shapes in sorted(paths.items())
    ]
    return [*body, *said], top + many * high


def _boxes(lane: ScheduleLane, scale: float) -> list[tuple[int, int, float, float]]:
    """Return (kind, microbatch, left, width) of each action, with a hair between neighbours."""
    found: list[tuple[int, int, float, float]] = []
    columns = (lane.kinds, lane.microbatches, lane.starts, lane.ends)
    for kind, microbatch, start, end in zip(*columns, strict=True):
        if not (isfinite(start) and isfinite(end)) or end <= start:
            continue
        left = _LEFT + max(0.0, start * scale)
        right = min(PAGE, _LEFT + end * scale)
        if right > left:
            wide = right - left
            found.append((kind, microbatch, left, wide - 0.5 if wide > 2 else wide))
    return found


def _ticks(whole: float, top: float) -> list[str]:
    body: list[str] = []
    for tick in range(_TICKS + 1):
        x = _LEFT + (PAGE - _LEFT) * tick / _TICKS
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        said = seconds_text(whole * tick / _TICKS, whole)
        body.append(words(x, top + 13, said, anchor=anchor, size=SMALL, look=FAINT))
    return body
