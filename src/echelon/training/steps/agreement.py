# SPDX-License-Identifier: Apache-2.0
"""What all ranks must know of a step: one small all-gather behind its backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.models.batch import start_copy
from echelon.parallel.device_mesh import RankGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldByRank:
    """Hold what a rank tells the others of a step."""

    loss: torch.Tensor | float
    """Its part of the loss."""
    norm_squared: torch.Tensor | float
    """The sum of the squares of gradients that count on it."""
    stop_requested: bool = False
    """Whether it was asked to stop."""
    used_bytes: int = 0
    """Memory that it uses."""
    by_parts: Sequence[float] = ()
    """Numbers that step parts tell."""


TOLD_BY_ALL = 5
"""Numbers of a row before those of step parts."""


def agree(told: ToldByRank, groups: RankGroups, device: torch.device) -> torch.Tensor:
    """Return a row of each rank [ranks, 5 + by_parts]: loss, squares, stop, seconds waited, bytes.

    Losses are summed over everything but the tensor ranks (they hold the same loss), squares over
    one replica: whole gradients on one data rank, slices on those of one replica. A copy adds
    nothing, unless it alone is not finite: no rank may update then.
    """
    known = torch.tensor(
        [
            float(told.stop_requested),
            groups.recorder.waited_s,
            float(told.used_bytes),
            *told.by_parts,
        ],
        dtype=torch.float64,
    )
    loss = told.loss if groups.tensor.index == 0 else 0.0
    sums = torch.stack([_float64(one, device) for one in (loss, told.norm_squared)])
    rows = groups.world.gather_rows(torch.cat([sums, start_copy(known, device)]), name="step")
    with groups.recorder.reading("the sums of all ranks"):
        return rows.cpu()


def sum_of(losses: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of microbatches on the device; 0 on ranks that have none."""
    return torch.stack(list(losses.values())).sum().double() if losses else torch.zeros(())


def _float64(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return a number on the device without waiting for it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
