# SPDX-License-Identifier: Apache-2.0
"""Figures that only lessons have: tiles on places that move, trees of questions, folded sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TileState: TypeAlias = Literal["whole", "part", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
