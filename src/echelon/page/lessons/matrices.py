# SPDX-License-Identifier: Apache-2.0
"""Small matrices of whole numbers, and their blocks as tiles: what is drawn adds up exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import ParameterSpec, parameters
from echelon.page.lessons.lesson import Tile, TileState

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


def dot_text(left: Matrix, right: Matrix, row: int = 0, column: int = 0) -> str:
    """Return how one number of a product is made: ``1 x 2 + 0 x (-1) = 2``."""
    terms = zip(left[row], (line[column] for line in right), strict=True)
    total = product(left, right)[row][column]
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
