# SPDX-License-Identifier: Apache-2.0
"""What each rank of a pipeline does in a step: charts on one scale of seconds."""

from __future__ import annotations

from math import isfinite

from echelon.core.svg import text_width
from echelon.page.drawn.axis import seconds_text
from echelon.page.drawn.marks import (
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
    words,
)
from echelon.page.figures import ScheduleChart, ScheduleFigure, ScheduleLane

_LEFT = 64  # pixels of the labels of ranks
_TICKS = 6  # times that are named, but the first


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
