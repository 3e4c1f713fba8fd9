# SPDX-License-Identifier: Apache-2.0
"""A document: plain values that text, a page, a notebook and a drawing render.

A document has sections, a section a figure or a table; each number stands there with its words and
its unit, so that no renderer adds a number or a unit. Text is rendered by `figure_text.py` and
`text_layout.py`, pages by `web/`, drawings and notebooks by `page/drawn/`. The types of the page's
TypeScript are generated from these records (`web/formulas/schema.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from echelon.core.version import __version__

SCHEMA = 1
"""Raised when a reader of an older document would misread a new one."""


def this_version() -> str:
    """What writes documents: "Echelon" and its version."""
    return f"Echelon {__version__}"


Tone: TypeAlias = Literal["compute", "communication", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTable:
    """Hold the numbers of a figure as a table, or a table that stands alone.

    `right` names the columns of numbers, which are aligned by their last digit.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()

    @classmethod
    def of(cls, head: Sequence[str], rows: Iterable[Sequence[object]]) -> DataTable:
        """Return a table of anything; columns of numbers stand right."""
        body = tuple(tuple(map(str, row)) for row in rows)
        return cls(head=tuple(head), rows=body, right=number_columns(len(head), body))


def number_columns(count: int, rows: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return which of `count` columns hold numbers, or a dash; the first never does."""
    return tuple(
        column
        for column in range(1, count)
        if all(row[column][:1].isdigit() or row[column] == "-" for row in rows)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDigit:
    """Hold one digit of a rank's coordinate: ``rank // stride % degree``."""

    degree: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Hold an axis of more than one rank, with the links that its groups travel over.

    A group is all ranks that differ in the digits of the axis alone; outermost digits come first.
    """

    name: str
    degree: int
    digits: tuple[MeshDigit, ...]
    link: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFigure:
    """Hold the ranks of a mesh on the devices of a cluster: rank r is on node r // per node.

    `axes` are outermost first; `words` are sentences that are said of the cluster's links.
    """

    kind: Literal["mesh"] = "mesh"
    cluster: str
    device: str
    ranks: int
    devices_per_node: int
    axes: tuple[MeshAxis, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """One bar: a value for each kind of its figure, and its total; `over` is beyond a limit."""

    label: str
    values: tuple[float, ...]
    texts: tuple[str, ...]
    total: float
    total_text: str
    share_text: str = ""
    over: bool = False

    @classmethod
    def of(
        cls,
        label: str,
        values: Iterable[float],
        text: Callable[[float], str],
        *,
        share_text: str = "",
    ) -> BarRow:
        """Return the bar of some values, which `text` writes with their unit, without a limit."""
        parts = tuple(float(value) for value in values)
        total = sum(parts)
        return cls(
            label=label,
            values=parts,
            texts=tuple(map(text, parts)),
            total=total,
            total_text=text(total),
            share_text=share_text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BarsFigure:
    """Hold bars of parts, one over the other, beside a limit (0: there is none)."""

    kind: Literal["bars"] = "bars"
    kinds: tuple[str, ...]
    limit: float = 0.0
    limit_text: str = ""
    rows: tuple[BarRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallBarPart:
    """Hold the seconds of a bar that have one tone."""

    tone: Tone
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRow:
    """Hold a bar that starts where the one before it ended, in seconds."""

    label: str
    start: float
    parts: tuple[WaterfallBarPart, ...]
    text: str
    share_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallTone:
    """The seconds of all terms of one tone, as text, and its name."""

    tone: Tone
    name: str
    text: str
    share_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallFigure:
    """The seconds of a step by term."""

    kind: Literal["waterfall"] = "waterfall"
    """The kind of figure."""
    rows: tuple[WaterfallRow, ...]
    """A bar for each term that is not small."""
    tones: tuple[WaterfallTone, ...]
    """The seconds of each tone; they add up to the total as it is shown."""
    others: tuple[str, ...]
    """Small terms, which are one bar: "other"."""
    total: float
    """Seconds of the step."""
    total_text: str
    """The same with its unit."""
    low: float
    """Seconds at which the band begins: four of five measured steps are in it."""
    high: float
    """Seconds at which the band ends."""
    band_text: str
    """Both ends of the band with their unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLane:
    """Hold what one rank of a pipeline does in a step, as columns of equal length.

    `kinds` are places in the figure's `kinds`; times are seconds since the first action.
    """

    label: str
    kinds: tuple[int, ...]
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    idle_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChart:
    """Hold a step of a pipeline, planned or measured: its ranks, how long it takes, its bubble.

    `reached` is the time up to which it is told, where that is not all: what a rank waits until
    then is drawn as idle, what comes later not at all.
    """

    name: str
    lanes: tuple[ScheduleLane, ...]
    span_s: float
    span_text: str
    bubble_text: str
    reached: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFigure:
    """Hold charts of the same pipeline under one another, on one scale of seconds, or of slots.

    A slot is the time of one forward pass; its numbers are whole.
    """

    kind: Literal["schedule"] = "schedule"
    kinds: tuple[str, ...]
    charts: tuple[ScheduleChart, ...]
    unit: Literal["s", "slots"] = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSeries:
    """Hold one line: its values at the figure's steps; None is a step without one."""

    name: str
    values: tuple[float | None, ...]
    joined: bool = False
    """Whether the line goes on over steps without a value, and does not break there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesFigure:
    """Hold lines over the steps of a run, with one unit; a planned value is drawn as a level."""

    kind: Literal["lines"] = "lines"
    unit: str
    steps: tuple[int, ...]
    series: tuple[LineSeries, ...]
    planned: float | None
    planned_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatRow:
    """Hold a row of cells; None is a cell without a value."""

    label: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatFigure:
    """Hold a grid of cells whose darkness is their value, from 0 to `most`."""

    kind: Literal["heat"] = "heat"
    columns: tuple[str, ...]
    rows: tuple[HeatRow, ...]
    most: float
    legend: str


Figure: TypeAlias = (
    MeshFigure | BarsFigure | WaterfallFigure | ScheduleFigure | LinesFigure | HeatFigure
)


@dataclass(frozen=True, slots=True)
class Fact:
    """Hold one number under the verdict: its name, the number with its unit, and what it means."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Hold a part of the page.

    `summary` says in a sentence or two what the figure shows, also to who cannot see it; `notes`
    stand under it, `commands` are what a reader can run. `table` has the figure's numbers.
    """

    id: str
    title: str
    summary: str
    figure: Figure | None = None
    table: DataTable | None = None
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument:
    """Hold a whole page."""

    schema: int = SCHEMA
    """The version of what a document is."""
    kind: Literal["report"] = "report"
    """What kind of page it is."""
    title: str
    """The name of what it is about, and which of its sides is shown."""
    subject: str
    """What it is about: model, ranks, cluster, hash."""
    verdict: str
    """The answer in one sentence."""
    good: bool
    """Whether the answer is good news."""
    facts: tuple[Fact, ...] = ()
    """The numbers that stand right below the verdict."""
    sections: tuple[Section, ...] = ()
    """The parts, in order."""
    made_by: str = field(default_factory=this_version)
    """The version that wrote it."""
