# SPDX-License-Identifier: Apache-2.0
"""What a lesson is: a figure that is walked through step by step, with the engine's numbers.

A lesson has controls with a few values each. For each combination of values there is a scene, and a
scene has one frame or more, which a reader walks through or plays. All frames are made by Python,
from the formulas, schedules and records of the engine: the page computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, TypeAlias

from echelon.planner.view.document import (
    BarsFigure,
    DataTable,
    Fact,
    HeatFigure,
    LinesFigure,
    MeshFigure,
    ScheduleFigure,
)

TileState: TypeAlias = Literal["whole", "part", "gone"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Hold something that a place has: a block of a matrix, a chunk, a layer, a token.

    A tile that has the same `id` in two frames is the same thing, and is seen moving; one that has
    an `origin` is a copy, and is seen coming from there. A `part` is one summand of a sum that is
    not complete; what is `gone` is drawn as an empty outline. `kind` is a place in the diagram's
    `kinds`. Rows and columns count from 0.
    """

    id: str
    """Unique in its frame."""
    label: str
    """What is written on it: a few letters, or the numbers of a small matrix in lines."""
    words: str
    """What it is in words, for who points at it or hears it."""
    kind: int
    """Which of the figure's kinds."""
    state: TileState = "whole"
    """Whether it is complete."""
    row: int = 0
    """Its first row in its place."""
    column: int = 0
    """Its first column in its place."""
    rows: int = 1
    """How many rows it covers."""
    columns: int = 1
    """How many columns it covers."""
    origin: str = ""
    """The tile of the frame before that this one comes from; "" where it is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Hold a place with its tiles: a rank, a device, a host. Places of one `group` share a box."""

    label: str
    note: str
    tiles: tuple[Tile, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """Hold an arrow from a tile to another, by their ids, with what is said of it."""

    source: str
    target: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagramFigure:
    """Hold places with tiles, and arrows between tiles; `kinds` are named in the legend."""

    kind: Literal["diagram"] = "diagram"
    kinds: tuple[str, ...]
    places: tuple[Place, ...]
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionBranch:
    """Hold an answer, and the id of the node that it leads to."""

    answer: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionNode:
    """Hold a question with its branches or, without any, a leaf.

    `chosen` nodes are on the path that the frame's numbers take; `why` is the arithmetic.
    """

    id: str
    text: str
    branches: tuple[QuestionBranch, ...] = ()
    chosen: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFigure:
    """Hold a tree of questions; the first node is its root."""

    kind: Literal["tree"] = "tree"
    nodes: tuple[QuestionNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Hold a result that unfolds into the lines that it comes from."""

    title: str
    result: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldsFigure:
    """Hold a derivation in parts that are unfolded one by one."""

    kind: Literal["folds"] = "folds"
    folds: tuple[Fold, ...]


LessonFigure: TypeAlias = (
    DiagramFigure
    | TreeFigure
    | FoldsFigure
    | BarsFigure
    | HeatFigure
    | LinesFigure
    | MeshFigure
    | ScheduleFigure
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonControl:
    """Hold something that a reader chooses; `start` is the place of the value at first."""

    name: str
    label: str
    values: tuple[str, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Hold what one step shows, and says in a sentence or two."""

    caption: str
    figures: tuple[LessonFigure, ...]
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Hold the steps for one choice of values, and its numbers as a table."""

    frames: tuple[Frame, ...]
    table: DataTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Hold what a published guide said where that is wrong, and what holds; `id` is the claim's."""

    id: str
    said: str
    holds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Hold a figure with its controls.

    `rows` are the figures of the published guides that it redraws. The scenes are in the order of
    the product of the controls' values, the last control's changing fastest.
    """

    id: str
    """Its name in an address: lower case, hyphens."""
    topic: str
    """Under which heading it is listed."""
    title: str
    """What it is called."""
    rows: tuple[str, ...]
    """Which figures of the guides it is."""
    summary: str
    """What it shows, in a sentence or two."""
    source: str
    """Where its numbers come from: a formula, a schedule, a recorded run."""
    controls: tuple[LessonControl, ...] = ()
    """What can be chosen."""
    scenes: tuple[Scene, ...]
    """One for each choice."""
    corrections: tuple[Correction, ...] = ()
    """Where a guide was wrong."""
    commands: tuple[str, ...] = ()
    """What shows the same in a terminal."""

    def __post_init__(self) -> None:
        wanted = prod(len(control.values) for control in self.controls)
        if wanted != len(self.scenes):
            raise ValueError(f"{self.id}: {wanted} choices, but {len(self.scenes)} scenes")

    def scene(self, **chosen: str) -> Scene:
        """Return the scene of these values; a control that is not named is at its start."""
        place = 0
        for control in self.controls:
            value = chosen.pop(control.name, control.values[control.start])
            place = place * len(control.values) + control.values.index(value)
        if chosen:
            raise KeyError(f"{self.id} has no control {', '.join(chosen)}")
        return self.scenes[place]


def choices(controls: tuple[LessonControl, ...]) -> list[dict[str, str]]:
    """Return every choice of values by name, in the order of a lesson's scenes."""
    names = [control.name for control in controls]
    return [
        dict(zip(names, values, strict=True))
        for values in product(*(control.values for control in controls))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonBook:
    """Hold lessons, in the order in which they are listed."""

    lessons: tuple[Lesson, ...]
