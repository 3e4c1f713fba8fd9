# SPDX-License-Identifier: Apache-2.0
"""Memory bars: what each rank or stage holds, by kind, beside the memory of its device.

    stage 0  PPPGGGOOOOOOOOAAAAAAAAAAAA      |        61.80 GiB   83.0 %
    stage 1  PPPGGGOOOOOOOOAAAAAAAAAAAAAAAAAA|aaaaa   82.10 GiB  110.2 %

A letter is a kind of bytes; behind the line, which is the memory of the device, it is lower case.

Rows of a plan are what each pipeline rank holds at its peak (`predict/estimate.py`): a bound, as
the parts need not be at their most at the same time. A CPU's device is the memory of its host:
there what rests on the host counts too. What a process or an allocator holds back does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum, isfinite

from rich.cells import cell_len

from echelon.core.plan import Plan
from echelon.core.units import binary_bytes
from echelon.cost.peak.rank_peak import TERMS
from echelon.layout.stage import rank_part
from echelon.planner.predict.estimate import peak_bytes_by_place
from echelon.planner.view.lines import (
    WIDTH,
    Span,
    TextLine,
    mark_color,
    pad_text,
    table_lines,
    truncate_text,
)
from echelon.planner.view.terms import (
    MOST_TERMS_SHOWN,
    OTHER,
    TermStyle,
    require_valid_terms,
    round_bytes,
    term_styles,
)

_LONGEST_LABEL = 18  # columns of text
_NARROWEST = 10  # columns of text
_OVER = mark_color(0, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Hold the bytes of one rank or stage by kind."""

    label: str
    terms: Mapping[str, float]

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return fsum(self.terms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBars:
    """Hold rows of bytes, the kinds in them, and the memory of a device."""

    rows: tuple[MemoryRow, ...]
    kinds: tuple[TermStyle, ...]
    limit_bytes: float

    @property
    def largest(self) -> float:
        """Return the bytes that the width of a picture stands for."""
        return max([self.limit_bytes, *(row.total for row in self.rows)])

    @property
    def fullest(self) -> MemoryRow:
        """Return the first row that holds most."""
        return max(self.rows, key=lambda row: row.total)

    def over(self, row: MemoryRow) -> bool:
        """Return whether a row holds more than the device has."""
        return row.total > self.limit_bytes

    def share(self, row: MemoryRow) -> str:
        """Return how much of the device a row takes, in %; never 100.0 where it does not fit."""
        if self.limit_bytes <= 0:
            return ""
        percent = 100 * row.total / self.limit_bytes
        if percent >= 1000:
            return ">999 %"
        shown = f"{percent:.1f}"
        if self.over(row) and shown == "100.0":
            return ">100 %"
        return f"{shown} %"

    def lines(self, *, columns: int = WIDTH) -> list[TextLine]:
        """Return the bars, and the kinds of the fullest row, as lines of 80 columns at most."""
        if not self.rows:
            return [(Span("(no ranks)"),)]
        return [*_bars(self, columns=columns), (), *_legend_lines(self)]

    def says(self, row: MemoryRow) -> str:
        """Return what a row holds of what the device has, in words."""
        of = f" of {binary_bytes(self.limit_bytes)}" if self.limit_bytes > 0 else ""
        share = f" ({self.share(row)})" if self.limit_bytes > 0 else ""
        return f"{row.label} holds {binary_bytes(row.total)}{of}{share}"


def memory_bars(rows: Sequence[tuple[str, Mapping[str, float]]], limit_bytes: float) -> MemoryBars:
    """Return bars of (label, bytes by kind), in this order, beside `limit_bytes` of memory.

    Kinds stand in the order in which rows name them first. Where there are too many to tell them
    apart, the smallest are one kind, "other". ValueError for bytes that are no number from 0 up.
    """
    if not (isfinite(limit_bytes) and limit_bytes >= 0):
        raise ValueError(f"limit_bytes is {limit_bytes}, not a number from 0 up")
    numbers = [(label, require_valid_terms(terms)) for label, terms in rows]
    most: dict[str, float] = {}
    for _, terms in numbers:
        for name, held in terms.items():
            most[name] = max(most.get(name, 0.0), held)
    names = [name for name, held in most.items() if held > 0]
    if len(names) > MOST_TERMS_SHOWN:
        kept = sorted((n for n in names if n != OTHER), key=lambda name: -most[name])
        large = {*kept[: MOST_TERMS_SHOWN - 1]}
        names = [*(name for name in names if name in large), OTHER]
    return MemoryBars(
        rows=tuple(MemoryRow(label=label, terms=_merged(terms, names)) for label, terms in numbers),
        kinds=term_styles(names),
        limit_bytes=float(limit_bytes),
    )


def _merged(terms: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    found = {name: terms.get(name, 0.0) for name in names}
    rest = fsum(held for name, held in terms.items() if name not in found)
    if rest:
        found[OTHER] = found.get(OTHER, 0.0) + rest
    return found


def _bars(bars: MemoryBars, *, columns: int) -> Iterator[TextLine]:
    labels = [truncate_text(row.label, _LONGEST_LABEL) for row in bars.rows]
    margin = max(map(cell_len, labels))
    totals = [binary_bytes(row.total) for row in bars.rows]
    shares = [bars.share(row) for row in bars.rows]
    right = [max(map(len, totals)), max(map(len, shares))]
    # One column is the line, two stand before the bar, two before each number.
    room = max(columns - margin - sum(right) - 7, _NARROWEST)
    for row, label, total, share in zip(bars.rows, labels, totals, shares, strict=True):
        yield (
            Span(pad_text(label, margin) + "  "),
            *_bar(bars, row, room),
            Span(f"  {total.rjust(right[0])}  {share.rjust(right[1])}".rstrip()),
        )
    if bars.limit_bytes > 0:
        memory = binary_bytes(bars.limit_bytes)
        yield (Span(f"| the memory of a device, {memory}; lower case: more than it has"),)


def _bar(bars: MemoryBars, row: MemoryRow, room: int) -> Iterator[Span]:
    """Yield the columns of a bar, which are `room` and the line."""
    limit, largest = bars.limit_bytes, bars.largest
    if limit <= 0:
        yield from _cells(bars, row, (0.0, row.total), room / largest if largest > 0 else 0.0, room)
        return
    line = round(limit / largest * room)
    if largest > limit:
        line = min(line, room - 1)
    yield from _cells(bars, row, (0.0, min(row.total, limit)), line / limit, line)
    yield Span("|", _OVER if bars.over(row) else "")
    if bars.over(row):
        scale = (room - line) / (largest - limit)
        yield from _cells(bars, row, (limit, row.total), scale, room - line)
    else:
        yield Span(" " * (room - line))


def _cells(
    bars: MemoryBars, row: MemoryRow, part: tuple[float, float], scale: float, room: int
) -> Iterator[Span]:
    """Yield the `room` columns for the bytes from `part[0]` to `part[1]`, `scale` to a byte."""
    begin, end = part
    over = begin > 0
    filled = max(round((end - begin) * scale), int(over))
    at, held = 0, 0.0
    for kind in bars.kinds:
        held += row.terms.get(kind.name, 0.0)
        stop = round((min(max(held, begin), end) - begin) * scale)
        # What does not fit is seen, however little of it there is.
        if over and held > begin:
            stop = max(stop, 1)
        letter = kind.letter.lower() if over else kind.letter
        stop = min(max(stop, at), filled)
        yield Span(letter * (stop - at), _OVER if over else mark_color(kind.hue))
        at = stop
    yield Span(" " * (room - at))


def _legend_lines(bars: MemoryBars) -> Iterator[TextLine]:
    row = bars.fullest
    if not bars.kinds:
        yield (Span("Nothing is held."),)
        return
    shown = round_bytes(row.terms)
    place = truncate_text(row.label, _LONGEST_LABEL)
    rows = [
        ("", "", f"in {place}" if len(bars.rows) > 1 else "bytes", "share"),
        *(
            (one.letter, truncate_text(one.name, 40), shown.value(one.name), shown.share(one.name))
            for one in bars.kinds
        ),
        ("", "total", shown.value(), shown.share()),
    ]
    yield from table_lines(rows, right=(False, False, True, True))


def memory_rows_from_plan(plan: Plan) -> list[tuple[str, dict[str, float]]]:
    """Return (label, bytes by term) of each pipeline rank; those alike that follow are one row."""
    places = range(plan.mesh.pp)
    stages = [[part.stage for part in rank_part(plan, pp).stages] for pp in places]
    word = "stage" if stages == [[pp] for pp in places] else "pp rank"
    found = [{name: held[name] for name in TERMS} for held in peak_bytes_by_place(plan)]
    rows: list[tuple[str, dict[str, float]]] = []
    for _, run in groupby(places, key=lambda pp: [*found[pp].values()]):
        alike = [*run]
        many = f"s {alike[0]}-{alike[-1]}" if len(alike) > 1 else f" {alike[0]}"
        rows.append((word + many, found[alike[0]]))
    return rows
