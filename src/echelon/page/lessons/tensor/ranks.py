# SPDX-License-Identifier: Apache-2.0
"""Tensor ranks of the lessons: boxes of ranks, bytes as facts, an MLP of whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.plan import DTYPE_BYTES
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.page.lessons.lesson import LessonControl, Place, Tile
from echelon.page.lessons.matrices import (
    Matrix,
    added,
    columns_of,
    cut,
    filled,
    mlp_weights,
    product,
    rectified,
)
from echelon.planner.view.document import Fact

EVERYWHERE = 0
"""The kind of what every rank has whole; rank r's own parts are of kind r + 1."""
BYTES = DTYPE_BYTES["bf16"]
"""Bytes of a number in these lessons."""


def kinds_of(degree: int) -> tuple[str, ...]:
    """Return the kinds of a figure: what all have, and the part of each tensor rank."""
    return ("whole on every rank", *(f"the part of rank {rank}" for rank in range(degree)))


def degree_control(*degrees: int, start: int) -> LessonControl:
    """Return the control that chooses how many tensor ranks there are."""
    return LessonControl(
        name="ranks",
        label="tensor ranks N",
        values=tuple(map(str, degrees)),
        start=degrees.index(start),
    )


def place(label: str, group: str, tiles: Sequence[Tile], note: str = "") -> Place:
    """Return a matrix in the box of its rank."""
    return Place(label=label, note=note, tiles=tuple(tiles), group=group)


def weights_fact(held: int, whole: int) -> Fact:
    """Return how many weights a rank holds."""
    return Fact(
        name="weights on a rank",
        value=f"{held:,} of {whole:,}",
        note=f"{decimal_bytes(held * BYTES)} in bf16",
    )


def nothing_sent() -> Fact:
    """Return that a step sends nothing."""
    return Fact(name="a rank sends", value=decimal_bytes(0), note="all it needs is there")


def gather_fact(piece: int, degree: int, what: str) -> Fact:
    """Return what a rank sends so that all get the pieces of all, of `piece` numbers each."""
    sent = all_gather_bytes(piece * BYTES, degree)
    return Fact(
        name="a rank sends",
        value=decimal_bytes(sent),
        note=f"all-gather of {what}: (N-1) x {decimal_bytes(piece * BYTES)}",
    )


def sum_fact(payload: int, degree: int, what: str) -> Fact:
    """Return what a rank sends to sum `payload` numbers over all."""
    sent = all_reduce_bytes(payload * BYTES, degree)
    return Fact(
        name="a rank sends",
        value=decimal_bytes(sent),
        note=f"all-reduce of {what}: 2 (N-1)/N x {decimal_bytes(payload * BYTES)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Hold an MLP with its input, whole: y = max(0, x W1) W2."""

    x: Matrix
    first: Matrix
    second: Matrix

    @property
    def inner(self) -> Matrix:
        """Return x W1, before the activation."""
        return product(self.x, self.first)

    @property
    def output(self) -> Matrix:
        """Return y, as one device computes it."""
        return product(rectified(self.inner), self.second)

    def columns_then_rows(self, degree: int) -> ColumnsThenRows:
        """Return it cut as the engine cuts an MLP."""
        up, down = mlp_weights(len(self.first), len(self.second))
        return ColumnsThenRows(
            x=self.x, first=cut(up, self.first, degree), second=cut(down, self.second, degree)
        )

    def rows_then_columns(self, degree: int) -> RowsThenColumns:
        """Return it cut the other way around: W1 as the engine cuts W2, W2 as it cuts W1.

        The ranges are those of a matrix of the same width that is cut along that dim.
        """
        hidden, inner = len(self.first), len(self.second)
        by_rows, by_columns = mlp_weights(inner, hidden)[1], mlp_weights(inner, hidden)[0]
        ranges = [by_rows.local_range(degree, rank) for rank in range(degree)]
        return RowsThenColumns(
            inputs=tuple(columns_of(self.x, *one) for one in ranges),
            first=cut(by_rows, self.first, degree),
            second=cut(by_columns, self.second, degree),
        )


def mlp_of(tokens: int, hidden: int, inner: int) -> Mlp:
    """Return the MLP of a lesson: the same numbers every time."""
    return Mlp(
        x=filled(tokens, hidden, 7), first=filled(hidden, inner, 1), second=filled(inner, hidden, 6)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsThenRows:
    """Hold what N ranks compute where W1 is cut by columns and W2 by rows."""

    x: Matrix
    first: tuple[Matrix, ...]
    second: tuple[Matrix, ...]

    @property
    def inner(self) -> tuple[Matrix, ...]:
        """Return, of each rank, its features of x W1: complete."""
        return tuple(product(self.x, part) for part in self.first)

    @property
    def active(self) -> tuple[Matrix, ...]:
        """Return the same after the activation, which needs no other feature."""
        return tuple(map(rectified, self.inner))

    @property
    def partial_sums(self) -> tuple[Matrix, ...]:
        """Return, of each rank, its summand of the output."""
        return tuple(product(a, b) for a, b in zip(self.active, self.second, strict=True))

    @property
    def output(self) -> Matrix:
        """Return what the all-reduce at the end makes of them."""
        return added(self.partial_sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsThenColumns:
    """Hold what N ranks compute where W1 is cut by rows and W2 by columns."""

    inputs: tuple[Matrix, ...]
    first: tuple[Matrix, ...]
    second: tuple[Matrix, ...]

    @property
    def partial_sums(self) -> tuple[Matrix, ...]:
        """Return, of each rank, its summand of x W1."""
        return tuple(product(a, b) for a, b in zip(self.inputs, self.first, strict=True))

    @property
    def active(self) -> Matrix:
        """Return the activation of the sum, which all ranks need first."""
        return rectified(added(self.partial_sums))

    @property
    def num_wrong(self) -> int:
        """Return how many numbers are wrong where each rank activates its own summand."""
        early = added(tuple(map(rectified, self.partial_sums)))
        rows = zip(early, self.active, strict=True)
        return sum(a != b for one, other in rows for a, b in zip(one, other, strict=True))

    @property
    def outputs(self) -> tuple[Matrix, ...]:
        """Return, of each rank, its columns of the output: complete."""
        return tuple(product(self.active, part) for part in self.second)
