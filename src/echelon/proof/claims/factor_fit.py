# SPDX-License-Identifier: Apache-2.0
"""A tensor fitted as a factor x the right one + rounding, with how well the factor is known.

Rounding errors of one row, or one column, may go together; so the standard error is that of sums
over rows, or over columns, whichever is larger (Liang and Zeger, 1986, "sandwich" over clusters).
Each element of a vector stands for itself.

Shape suffixes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

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
