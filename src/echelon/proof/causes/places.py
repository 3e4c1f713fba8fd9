# SPDX-License-Identifier: Apache-2.0
"""Which slice of a tensor is wrong, where the rest of it is right: rows, columns, positions.

Loops over pieces, slices of ranks and tiles make mistakes that end at an edge, so where a mistake
begins and ends tells more of it than its size.

Shape suffixes: B sequences, T positions, W numbers of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from echelon.proof.causes.finding import ProofFinding

_MOSTLY = 0.5
"""Part of a slice that must be wrong: single elements may be right by chance, as zeros are."""


def wrong_elements(seen: torch.Tensor, right: torch.Tensor, allowed: float) -> torch.Tensor:
    """Return which elements alone are further off than the whole tensor may be; NaN is."""
    bound = allowed * float(right.double().norm())
    return ~((seen.double() - right.double()).abs() <= bound)


def describe_slice(wrong: torch.Tensor, dims: Sequence[str] = ()) -> str:
    """Return in words the slice that is wrong, as "elements 6:8 of dim 0".

    `dims` names what each dim counts. It is "" where that is the whole tensor, or no slice.
    """
    if not bool(wrong.any()):
        return ""
    ranges = [
        _range(wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong)
        for dim in range(wrong.dim())
    ]
    inside = wrong[tuple(slice(first, stop) for first, stop in ranges)]
    parts = [
        f"{dims[dim]} {first}:{stop}" if dims else f"elements {first}:{stop} of dim {dim}"
        for dim, (first, stop) in enumerate(ranges)
        if (first, stop) != (0, wrong.shape[dim])
    ]
    if parts and float(inside.double().mean()) > _MOSTLY:
        return ", ".join(parts)
    first, stop = _range(wrong.flatten())
    flat = wrong.flatten()[first:stop]
    if dims or stop - first == wrong.numel() or float(flat.double().mean()) <= _MOSTLY:
        return ""
    return f"elements {first}:{stop}, counted row by row"


def _range(wrong: torch.Tensor) -> tuple[int, int]:
    at = torch.nonzero(wrong)[:, 0]
    return int(at[0]), int(at[-1]) + 1


def told_by_slice(finding: ProofFinding, where: str) -> ProofFinding:
    """Return a finding with the slice that it is limited to, which is told for want of a factor."""
    if not where:
        return finding
    factor = "slice" if finding.factor == "none" else finding.factor
    return replace(finding, factor=factor, description=f"in {where} only: {finding.description}")


def places_of_tokens(wrong_BTW: torch.Tensor, rows_BT: torch.Tensor) -> Iterator[str]:
    """Yield the sequences, positions and columns that are wrong, or else the rows of each rank.

    `rows_BT` says which row of its rank each token is.
    """
    if told := describe_slice(wrong_BTW.any(-1), ("sequences", "positions")):
        yield told
        return
    wrong_BT = wrong_BTW.any(-1)
    rows = torch.zeros(int(rows_BT.max()) + 1, dtype=torch.bool)
    rows[rows_BT[wrong_BT]] = True
    if bool(wrong_BT[rows[rows_BT]].all()) and (told := describe_slice(rows, ("rows",))):
        yield f"{told} of each rank"
        return
    if told := describe_slice(wrong_BTW, ("sequences", "positions", "columns")):
        yield told
