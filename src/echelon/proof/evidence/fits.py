# SPDX-License-Identifier: Apache-2.0
"""A tensor fitted as a factor x the right one + rounding, with how well the factor is known.

Rounding errors of one row, or one column, may go together; so the standard error is that of sums
over rows, or over columns, whichever is larger (Liang and Zeger, 1986, "sandwich" over clusters).
Each element of a vector stands for itself.

Shape suffixes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

EXPLAINED = 1e-6
"""The relative residual below which an explanation fits; float64 leaves 1e-12, luck 1e-1."""

FLOOR = 1e-4
"""The part of the norm of all tensors below which a tensor's error is not relative to itself."""

NUM_STANDARD_ERRORS = 6.0
"""How far a fit may be off by chance: once in 10^9 times."""

NUM_STANDARD_ERRORS_OF_FEW = 12.0
"""The same where fewer than `FEW` rows or columns stand for it (Student's t, 7 degrees)."""

FEW = 30
"""Rows or columns below which they are few."""

FEWEST = 8
"""Rows, and columns, or elements of a vector, below which nothing is fitted."""


@dataclass(frozen=True, slots=True)
class FactorFit:
    """Say by which factor a tensor is the right one, and how well that is known."""

    factor: float
    error: float
    clusters: int

    @property
    def by_chance(self) -> float:
        """Return how far the factor may be off by chance."""
        few = self.clusters < FEW
        return (NUM_STANDARD_ERRORS_OF_FEW if few else NUM_STANDARD_ERRORS) * self.error


def fit_part(observed: torch.Tensor, part: torch.Tensor) -> FactorFit | None:
    """Fit `observed` as a factor x `part` + rounding; None where there are too few elements."""
    part_RC, observed_RC = (_matrix(one) for one in (part, observed))
    num_rows, num_columns = part_RC.shape
    sizes = [num_rows, num_columns] if part.dim() > 1 else [num_rows]
    square = float(part_RC.square().sum())
    if min(sizes) < FEWEST or not square:
        return None
    factor = float((part_RC * observed_RC).sum()) / square
    pulls_RC = part_RC * (observed_RC - factor * part_RC)
    errors = (
        math.sqrt(float(pulls_RC.sum(1 - dim).square().sum()) * n / (n - 1)) / square
        for dim, n in enumerate(sizes)
    )
    return FactorFit(factor, max(errors), min(sizes))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows; a vector is a column."""
    return x.double().reshape(-1, x.shape[-1]) if x.dim() > 1 else x.double()[:, None]


def sizeable(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are not next to zero by mathematics."""
    whole = math.sqrt(sum(float(one.double().square().sum()) for one in tensors.values()))
    return (
        (name, one) for name, one in tensors.items() if float(one.double().norm()) > FLOOR * whole
    )


def nearly_equal(left: float, right: float) -> bool:
    """Return whether two factors are the same number but for rounding."""
    return abs(left - right) <= EXPLAINED * max(1e-3, abs(left), abs(right))


def furthest_value(values: Sequence[float], right: float) -> float:
    """Return the value that is furthest from the right one; one that is no number is."""
    return max(values, key=lambda v: math.inf if math.isnan(v) else abs(v - right))


def fit_factor(observed: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float]:
    """Return f that brings f x oracle nearest to `observed`, and the relative residual."""
    observed, oracle = observed.double().reshape(-1), oracle.double().reshape(-1)
    square = float(oracle @ oracle)
    factor = float(oracle @ observed) / square if square else 0.0
    return factor, relative_residual(observed, factor * oracle)


def fit_basis(observed: torch.Tensor, basis: Sequence[torch.Tensor]) -> tuple[list[float], float]:
    """Return the weights that bring a sum of `basis` nearest to `observed`, and the residual.

    The residual is infinite where there are not enough elements to tell.
    """
    matrix = torch.stack([one.double().reshape(-1) for one in basis], dim=1)
    if matrix.shape[0] < 2 * matrix.shape[1]:
        return [0.0] * len(basis), float("inf")
    target = observed.double().reshape(-1, 1)
    weights = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    return [float(w) for w in weights[:, 0]], relative_residual(target, matrix @ weights)


def relative_residual(observed: torch.Tensor, explained: torch.Tensor) -> float:
    """Return the norm of what is left unexplained over the norm of what was observed."""
    scale = max(float(observed.norm()), float(explained.norm()))
    return float((observed - explained).norm()) / scale if scale else 0.0
