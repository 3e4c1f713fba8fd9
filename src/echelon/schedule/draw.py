# SPDX-License-Identifier: Apache-2.0
"""Draw events as a timeline in text, one row per rank: simulated and measured ones alike.

    rank 0  F0--F1--F2--F3--............B0==B0==

Forward passes are filled with ``-``, whole backward passes with ``=``, input gradients with ``~``,
weight gradients with ``+``; a dot is idle time. Communication that takes time stands in a row of
its own per axis: ``>`` a send downstream, ``<`` upstream, ``#`` a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from echelon.core.event import Event
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
