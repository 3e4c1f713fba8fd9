# SPDX-License-Identifier: Apache-2.0
"""What a step says of its experts: how even their load was, what was dropped, and the losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from echelon.parallel.expert import LayerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSummary:
    """Sum up the routing of a global batch over all layers.

    `imbalance` is that of the worst layer: the load of its busiest expert over the mean.
    """

    assignments: int
    dropped: int
    aux_loss: float
    z_loss: float
    imbalance: float

    @property
    def dropped_share(self) -> float:
        """Return the part of all assignments that was dropped."""
        return self.dropped / self.assignments if self.assignments else 0.0

    @classmethod
    def from_rows(cls, rows: torch.Tensor) -> RoutingSummary:
        """Return the summary of the rows of all ranks."""
        assignments, dropped, aux_loss, z_loss = rows[:, :4].sum(0).tolist()
        return cls(
            assignments=int(assignments),
            dropped=int(dropped),
            aux_loss=aux_loss,
            z_loss=z_loss,
            imbalance=float(rows[:, 4].max()),
        )


def routing_row(loads: Mapping[int, LayerLoad], *, reports: bool) -> list[float]:
    """Return what a rank adds to the summary: nothing, where another one `reports` the same."""
    if not reports:
        return [0.0] * 5
    layers = loads.values()
    return [
        float(sum(sum(load.counts) for load in layers)),
        float(sum(load.dropped for load in layers)),
        sum(load.aux_loss for load in layers),
        sum(load.z_loss for load in layers),
        max((load.imbalance for load in layers), default=0.0),
    ]
