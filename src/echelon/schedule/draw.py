# SPDX-License-Identifier: Apache-2.0
"""Events drawn as a timeline, in text or as a figure: simulated and measured ones alike.

A text has one row per rank:

    rank 0  F0--F1--F2--F3--............B0==B0==

Forward passes are filled with ``-``, whole backward passes with ``=``, input gradients with ``~``,
weight gradients with ``+``; a dot is idle time. Communication that takes time stands in a row of
its own per axis: ``>`` a send downstream, ``<`` upstream, ``#`` a collective.

A figure has a row per rank and a box per action. Several panels stand one above the other on one
time axis, each from its own first start, so that a plan and its run, or two schedules, are compared
by eye. The text is the same for the same events. The figure has its own colors for light and for
dark pages, and needs nothing from outside.

A kind has a hue, a stage of a rank a shade of it: lower stages are lighter. Boxes keep their colors
on light and on dark pages (dark text on a light fill reads on both); page, text and lines change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from types import MappingProxyType

from echelon.core.event import Event
from echelon.core.svg import figure, fill, key, line, rect, style, text
from echelon.core.units import SECOND_UNITS
from echelon.schedule.action import ActionKind
from echelon.schedule.messages import Payload

_FILL = {
    ActionKind.F.value: "-",
    ActionKind.B.value: "~",
    ActionKind.W.value: "+",
    ActionKind.BW.value: "=",
}
_MARKS = {"down": ">", "up": "<", "collective": "#"}
_IDLE = "."
KEY = "- forward  ~ input gradient  + weight gradient  = both  . idle  > < sends  # collectives"
"""What the marks of a drawing mean, in one line."""
_NARROWEST = 10  # columns of text


def draw_timeline(events: Iterable[Event], width: int = 100, *, unit: str = "s") -> str:
    """Return `events` as lines of at most `width` columns (more if the names alone fill them).

    Time runs from the first start to the last end, in `unit`. A column shows what is going on in
    its middle, so an event shorter than a column may not be seen. Events of other kinds, such as
    ``update``, that neither compute a stage nor use an axis are left out.
    """
    drawn = [event for event in events if event.kind in _FILL or event.axis]
    if not drawn:
        return "(no events)\n"
    begin = min(event.start for event in drawn)
    span = max(event.end for event in drawn) - begin
    rows = [(title if own else f"  {title}", row) for title, row, own in timeline_rows(drawn)]
    owned = {(event.rank, event.stage) for event in drawn if event.kind in _FILL}
    margin = max(len(title) for title, _ in rows) + 2
    columns = max(width - margin, _NARROWEST)
    canvas = _Canvas(
        begin=begin,
        column_s=span / columns if span > 0 else 1.0,
        columns=columns,
        names_stage=len(owned) > len({rank for rank, _ in owned}),
    )
    lines = [title.ljust(margin) + canvas.row(row) for title, row in rows]
    lines.append(" " * margin + "0" + f"{span:.4g} {unit}".rjust(columns - 1))
    return "\n".join(lines) + "\n"


TimelineRow = tuple[str, list[Event], bool]
"""The title and the events of a row, and whether they are what a rank computes."""


def timeline_rows(events: Sequence[Event]) -> Iterator[TimelineRow]:
    """Yield what each rank computes, then what takes time on each axis that it uses."""
    for rank in sorted({event.rank for event in events}):
        own = [event for event in events if event.rank == rank]
        yield f"rank {rank}", [event for event in own if event.kind in _FILL], True
        talk = [event for event in own if event.kind not in _FILL and event.end > event.start]
        for axis in sorted({event.axis for event in talk}):
            yield axis, [event for event in talk if event.axis == axis], False


def direction(event: Event) -> str:
    """Return what sends something: a collective, or a stage to the one behind or before it."""
    if event.kind != "send":
        return "collective"
    return "up" if event.name.startswith(Payload.GRADIENT.value) else "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canvas:
    """Turn the events of one row into text: `columns` columns of `column_s` seconds each."""

    begin: float
    column_s: float
    columns: int
    names_stage: bool

    def row(self, events: Sequence[Event]) -> str:
        cells = [_IDLE] * self.columns
        for event in sorted(events, key=lambda event: (event.start, event.end)):
            first, last = self._column(event.start), self._column(event.end)
            cells[first:last] = self._text(event, last - first)
        return "".join(cells)

    def _column(self, time: float) -> int:
        """Return the first column whose middle is not before `time`."""
        return ceil((time - self.begin) / self.column_s - 0.5)

    def _text(self, event: Event, length: int) -> str:
        if event.kind not in _FILL:
            return _MARKS[direction(event)] * length
        fill = _FILL[event.kind]
        at = f"{event.stage}.{event.microbatch}" if self.names_stage else f"{event.microbatch}"
        for label in (f"{event.kind[0]}{at}", f"{event.microbatch}"):
            if len(label) <= length:
                return label.ljust(length, fill)
        return fill * length


KINDS = MappingProxyType(
    {
        ActionKind.F.value: (212, "forward"),
        ActionKind.BW.value: (350, "backward"),
        ActionKind.B.value: (36, "input gradient"),
        ActionKind.W.value: (145, "weight gradient"),
    }
)
"""The hue and the meaning of each kind of action that is drawn."""

_MESSAGE_CLASSES = MappingProxyType(
    {"down": "activation sent", "up": "gradient sent", "collective": "collective"}
)
_LIGHTEST = 0.86  # lightness, 0 to 1
_DARKEST = 0.60  # lightness, 0 to 1
_ONLY = 0.74  # lightness, 0 to 1

STYLE = style(
    light="""\
.down { fill: #4a7fb5; }
.up { fill: #b5654a; }
.collective { fill: #7a6ba8; }
"""
)


def fill_class(kind: str, shade: int) -> str:
    """Return the class of the box of an action, on the stage with that shade."""
    return f"box {kind}{shade}"


def shade_rules(num_shades: int) -> str:
    """Return the fills of all kinds in each shade."""
    return "".join(
        f".{kind}{shade} {{ fill: {_color(hue, shade, num_shades)}; }}\n"
        for kind, (hue, _) in KINDS.items()
        for shade in range(num_shades)
    )


def legend(
    names: Collection[str], num_shades: int, *, left: float, right: float, top: float
) -> tuple[list[str], float]:
    """Return the key to the kinds and messages in `names`, and where it ends.

    Entries stand beside one another and go on in a new line at `right`.
    """
    entries: list[tuple[list[str], str]] = [
        ([fill_class(kind, 0)], f"{kind}: {meaning}")
        for kind, (_, meaning) in KINDS.items()
        if kind in names
    ]
    if num_shades > 1 and entries:
        shades = [f"{entries[0][0][0][:-1]}{shade}" for shade in range(num_shades)]
        entries.append((shades, "stages of a rank, lowest first"))
    entries.extend(([name], meaning) for name, meaning in _MESSAGE_CLASSES.items() if name in names)
    return key(entries, left=left, right=right, top=top, thin=_MESSAGE_CLASSES)


def _color(hue: int, shade: int, num_shades: int) -> str:
    light = _ONLY
    if num_shades > 1:
        light = _LIGHTEST - (_LIGHTEST - _DARKEST) * shade / (num_shades - 1)
    return fill(hue, light)


_MARGIN = 16  # pixels
_RIGHT = 40
"""Room for half of the last label of the axis."""
_TITLE = 30  # pixels
_ROW = 26  # pixels
_BOX = 22  # pixels
_LANE = 7  # pixels
_GAP = 18  # pixels
_LETTER = 0.62
"""The width of a digit over its size, in the fonts of the style."""


def timeline_svg(events: Iterable[Event], *, title: str, width: int = 1000, unit: str = "s") -> str:
    """Return `events` as one SVG figure of `width` pixels; `unit` is what their times count."""
    return panels_svg([(title, events)], width=width, unit=unit)


def panels_svg(
    panels: Sequence[tuple[str, Iterable[Event]]], *, width: int = 1000, unit: str = "s"
) -> str:
    """Return each (title, events) as a panel of one SVG figure, all on one time axis."""
    drawn = [_Panel.of(title, events) for title, events in panels]
    span = max((panel.span for panel in drawn), default=0.0)
    left = _MARGIN + 7 * max(
        (len(title) for panel in drawn for title, _, _ in panel.rows), default=6
    )
    page = _Page(left=left + 10, right=width - _RIGHT, span=span)
    body: list[str] = []
    top = 10
    for panel in drawn:
        body.extend(panel.draw(page, top))
        top += panel.height + _GAP
    body.extend(_axis(page, top - _GAP, unit))
    num_shades = max((panel.num_shades for panel in drawn), default=1)
    names = {
        event.kind if event.kind in KINDS else direction(event)
        for panel in drawn
        for _, row, _ in panel.rows
        for event in row
    }
    key, bottom = legend(names, num_shades, left=page.left, right=page.right, top=top + 12)
    body.extend(key)
    return figure(
        body,
        name="; ".join(title for title, _ in panels),
        rules=STYLE + shade_rules(num_shades),
        width=width,
        height=round(bottom) + 12,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """Where time lies on the page."""

    left: float
    right: float
    span: float

    def x(self, time: float) -> float:
        """Return how far to the right `time`, counted from the start of its panel, lies."""
        return self.left + (self.right - self.left) * (time / self.span if self.span > 0 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """The rows of one timeline, and which shade each stage has on its rank."""

    title: str
    rows: tuple[TimelineRow, ...]
    begin: float
    span: float
    shades: dict[tuple[int, int | None], int]

    @classmethod
    def of(cls, title: str, events: Iterable[Event]) -> _Panel:
        drawn = sorted(
            (
                event
                for event in events
                if event.kind in KINDS or (event.axis and event.end > event.start)
            ),
            key=lambda event: (event.rank, event.start, event.end, event.name),
        )
        begin = min((event.start for event in drawn), default=0.0)
        end = max((event.end for event in drawn), default=0.0)
        return cls(
            title=title,
            rows=tuple(timeline_rows(drawn)),
            begin=begin,
            span=end - begin,
            shades=_shades(drawn),
        )

    @property
    def height(self) -> int:
        return _TITLE + sum(_ROW if computes else _LANE for _, _, computes in self.rows)

    @property
    def num_shades(self) -> int:
        return max(self.shades.values(), default=0) + 1

    def draw(self, page: _Page, top: int) -> Iterator[str]:
        yield text(_MARGIN, top + 16, self.title, "title")
        y = top + _TITLE
        right = page.x(self.span)
        for title, row, computes in self.rows:
            if computes:
                yield text(page.left - 8, y + 15, title, "rank")
                yield rect("idle", page.left, y, right - page.left, _BOX)
            for event in row:
                start, end = page.x(event.start - self.begin), page.x(event.end - self.begin)
                yield from self._box(event, start, end, y)
            y += _ROW if computes else _LANE

    def _box(self, event: Event, start: float, end: float, y: int) -> Iterator[str]:
        if event.kind not in KINDS:
            yield rect(direction(event), start, y - 3, end - start, _LANE - 3, _tip(event))
            return
        shade = self.shades[event.rank, event.stage]
        name = fill_class(event.kind, shade)
        yield rect(name, start, y, end - start, _BOX, _tip(event))
        label = "" if event.microbatch is None else str(event.microbatch)
        room = (end - start) / max(len(label), 1)
        if label and room >= 4.5:
            size = min(12.0, room / _LETTER * 0.9)
            yield text((start + end) / 2, y + 11 + 0.35 * size, label, "label", size)


def _shades(events: Sequence[Event]) -> dict[tuple[int, int | None], int]:
    """Return, for each rank and stage, how many lower stages the rank has."""
    stages: dict[int, set[int]] = {}
    for event in events:
        if event.kind in KINDS:
            stages.setdefault(event.rank, set())
            if event.stage is not None:
                stages[event.rank].add(event.stage)
    shades: dict[tuple[int, int | None], int] = {(rank, None): 0 for rank in stages}
    for rank, own in stages.items():
        shades |= {(rank, stage): shade for shade, stage in enumerate(sorted(own))}
    return shades


def _axis(page: _Page, top: int, unit: str) -> Iterator[str]:
    """Yield the time axis: a line, a mark at each round time, and what the numbers count."""
    yield line(page.left, top, page.right, top)
    scale, found, name = ticks(page.span, unit)
    for tick in found:
        x = page.x(tick)
        yield line(x, top, x, top + 5)
        label = f"{tick * scale:.6g}" + (f" {name}" if tick == found[-1] else "")
        yield text(x, top + 18, label, "tick")


def _tip(event: Event) -> str:
    return f"{event.name} on rank {event.rank}: {event.start:.6g} to {event.end:.6g}"


_MOST_TICKS = 12  # ticks


def ticks(span: float, unit: str) -> tuple[float, tuple[float, ...], str]:
    """Return a scale, the times of the ticks from 0 to `span`, and the name of a scaled unit.

    Seconds become ms, us or ns where `span` is short; a `unit` of another name is left as it is. A
    label is a tick times the scale.
    """
    if not span > 0:
        return 1.0, (0.0,), unit
    scale, name = 1.0, unit
    if unit == "s":
        scale, name = next((pair for pair in SECOND_UNITS if span * pair[0] >= 1), SECOND_UNITS[-1])
    step = _step(span * scale)
    count = floor(span * scale / step * (1 + 1e-9))
    return scale, tuple(step * k / scale for k in range(count + 1)), name


def _step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that a dozen steps reach at least to `span`."""
    least = span / _MOST_TICKS
    power = 10.0 ** floor(log10(least))
    for factor in (1, 2, 5, 10):
        if factor * power >= least * (1 - 1e-9):
            return factor * power
    return float(ceil(least))
