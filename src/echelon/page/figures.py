# SPDX-License-Identifier: Apache-2.0
"""What a figure of the page is: plain values, drawn by `web/src/figures/`, one file for each kind.

Each figure has numbers to draw and the words to say them with, made here with the units that the
terminal shows, so that the page and the commands never differ. The types of the page's TypeScript
are generated from these records (`schema.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Tone: TypeAlias = Literal["compute", "communication", "idle", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTable:
    """Hold the numbers of a figure as a table, or a table that stands alone.

    `right` names the columns of numbers, which are aligned by their last digit.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()


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
    """Hold one bar: a value for each kind of its figure, and what its total is, in words."""

    label: str
    values: tuple[float, ...]
    texts: tuple[str, ...]
    total: float
    total_text: str
    share_text: str
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BarsFigure:
    """Hold bars of parts, one over the other, beside a limit (0: there is none)."""

    kind: Literal["bars"] = "bars"
    kinds: tuple[str, ...]
    limit: float
    limit_text: str
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
class WaterfallFigure:
    """Hold the seconds of a step by term; the step is between `low` and `high` seconds."""

    kind: Literal["waterfall"] = "waterfall"
    rows: tuple[WaterfallRow, ...]
    total: float
    total_text: str
    low: float
    high: float
    band_text: str


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
