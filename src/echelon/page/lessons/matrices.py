# SPDX-License-Identifier: Apache-2.0
"""Small matrices of whole numbers, and their blocks as tiles: what is drawn adds up exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import DTYPE_BYTES
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.page.lessons.lesson import LessonControl, Place, Tile, TileState
from echelon.planner.view.document import Fact

Matrix: TypeAlias = tuple[tuple[int, ...], ...]
"""Rows of whole numbers."""


def filled(rows: int, columns: int, seed: int) -> Matrix:
    """Return a matrix of numbers from -2 to 2 that look drawn and are the same every time."""
    drawn = [seed]
    for _ in range(rows * columns):
        drawn.append((1103515245 * drawn[-1] + 12345) % 2**31)
    values = [(one >> 16) % 5 - 2 for one in drawn[1:]]
    return tuple(tuple(values[row * columns : (row + 1) * columns]) for row in range(rows))


@lru_cache(maxsize=256)
def product(left: Matrix, right: Matrix) -> Matrix:
    """Return left times right; ValueError where their shapes do not fit.

    Kept, as each frame of a lesson asks for the same products again.
    """
    columns = tuple(zip(*right, strict=True))
    return tuple(
        tuple(sum(a * b for a, b in zip(row, column, strict=True)) for column in columns)
        for row in left
    )


def added(parts: Sequence[Matrix]) -> Matrix:
    """Return the sum of matrices of one shape."""
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*parts, strict=True))


def beside(parts: Sequence[Matrix]) -> Matrix:
    """Return matrices of as many rows, joined along the last dim."""
    return tuple(tuple(x for row in rows for x in row) for rows in zip(*parts, strict=True))


def rectified(matrix: Matrix) -> Matrix:
    """Return max(0, x) of each number: an activation that leaves whole numbers whole."""
    return tuple(tuple(max(0, x) for x in row) for row in matrix)


def columns_of(matrix: Matrix, start: int, stop: int) -> Matrix:
    """Return the columns from `start` to `stop`."""
    return tuple(row[start:stop] for row in matrix)


def shape_text(matrix: Matrix) -> str:
    """Return the shape, such as ``[2, 4]``."""
    return f"[{len(matrix)}, {len(matrix[0])}]"


def numel(matrix: Matrix) -> int:
    """Return how many numbers there are."""
    return sum(map(len, matrix))


def matrix_text(matrix: Matrix) -> str:
    """Return the numbers in lines, aligned by their last digits."""
    width = max(len(str(x)) for row in matrix for x in row)
    return "\n".join(" ".join(f"{x:>{width}}" for x in row) for row in matrix)


def dot_text(left: Matrix, right: Matrix) -> str:
    """How the first number of a product is made: ``1 x 2 + 0 x (-1) = 2``."""
    terms = zip(left[0], (line[0] for line in right), strict=True)
    total = product(left, right)[0][0]
    return " + ".join(f"{_signed(a)} x {_signed(b)}" for a, b in terms) + f" = {total}"


def sum_text(numbers: Sequence[int]) -> str:
    """Return how numbers add up: ``3 + (-1) = 2``."""
    return " + ".join(map(_signed, numbers)) + f" = {sum(numbers)}"


def _signed(number: int) -> str:
    return f"({number})" if number < 0 else str(number)


def block(  # noqa: PLR0913 - a tile's own members, by their names
    id: str,
    name: str,
    matrix: Matrix,
    *,
    kind: int,
    state: TileState = "whole",
    row: int = 0,
    column: int = 0,
    origin: str = "",
) -> Tile:
    """Return a block of a matrix as a tile with its numbers; it is heard with its shape."""
    return Tile(
        id=id,
        label=matrix_text(matrix),
        words=f"{name}, {shape_text(matrix)}",
        kind=kind,
        state=state,
        row=row,
        column=column,
        origin=origin,
    )


def mlp_weights(hidden: int, ffn: int) -> tuple[ParameterSpec, ParameterSpec]:
    """Return the two matrices of an MLP as the engine has them: up, cut by columns, and down."""
    shape = ModelShape(
        name="mlp",
        layers=1,
        hidden=hidden,
        heads=1,
        kv_heads=1,
        head_dim=hidden,
        ffn=ffn,
        vocab=1,
        max_positions=1,
        gated=False,
    )
    found = {spec.name: spec for spec in parameters(shape)}
    return found["layers.0.mlp.up.weight"], found["layers.0.mlp.down.weight"]


def cut(spec: ParameterSpec, weight: Matrix, degree: int) -> tuple[Matrix, ...]:
    """Return what each of `degree` tensor ranks holds of a weight [in, out].

    The engine stores weights [out, in]: its dim 0 is the columns here, its dim 1 the rows.
    """
    ranges = [spec.local_range(degree, rank) for rank in range(degree)]
    if spec.split_dim == 0:
        return tuple(columns_of(weight, *one) for one in ranges)
    return tuple(weight[start:stop] for start, stop in ranges)


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
        "weights on a rank", f"{held:,} of {whole:,}", f"{decimal_bytes(held * BYTES)} in bf16"
    )


def nothing_sent() -> Fact:
    """Return that a step sends nothing."""
    return Fact("a rank sends", decimal_bytes(0), "all it needs is there")


def gather_fact(piece: int, degree: int, what: str) -> Fact:
    """Return what a rank sends so that all get the pieces of all, of `piece` numbers each."""
    sent = all_gather_bytes(piece * BYTES, degree)
    return Fact(
        "a rank sends",
        decimal_bytes(sent),
        f"all-gather of {what}: (N-1) x {decimal_bytes(piece * BYTES)}",
    )


def sum_fact(payload: int, degree: int, what: str) -> Fact:
    """Return what a rank sends to sum `payload` numbers over all."""
    sent = all_reduce_bytes(payload * BYTES, degree)
    return Fact(
        "a rank sends",
        decimal_bytes(sent),
        f"all-reduce of {what}: 2 (N-1)/N x {decimal_bytes(payload * BYTES)}",
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
