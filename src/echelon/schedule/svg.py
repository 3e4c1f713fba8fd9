# SPDX-License-Identifier: Apache-2.0
"""Draw events as a figure: a row per rank, a box per action, simulated and measured ones alike.

Several panels stand one above the other on one time axis, each from its own first start, so that a
plan and its run, or two schedules, are compared by eye. The text is the same for the same events.
The figure has its own colors for light and for dark pages, and needs nothing from outside.

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
from echelon.schedule.action import ActionKind
from echelon.schedule.draw import TimelineRow, direction, timeline_rows

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
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))


def ticks(span: float, unit: str) -> tuple[float, tuple[float, ...], str]:
    """Return a scale, the times of the ticks from 0 to `span`, and the name of a scaled unit.

    Seconds become ms, us or ns where `span` is short; a `unit` of another name is left as it is. A
    label is a tick times the scale.
    """
    if not span > 0:
        return 1.0, (0.0,), unit
    scale, name = 1.0, unit
    if unit == "s":
        scale, name = next((pair for pair in _UNITS if span * pair[0] >= 1), _UNITS[-1])
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
