# SPDX-License-Identifier: Apache-2.0
"""Sizes that the guides name: the size guide, and layouts of models on so many devices.

The size guide (llm-training, section 10) has a row for ranges of parameters and devices. Corners of
these ranges do not all fit (llm-training-66 to -68), so a row is always shown with the split that
it comes to on the reader's cluster, and what that holds.

Of the named layouts devices and degrees are the guides'; what each rank holds is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.mesh import Mesh
from echelon.core.plan import ZeroStage
from echelon.cost.bytes.model_sizes import MIXED_PRECISION, model_states
from echelon.handbook.guides.situation import Situation
from echelon.handbook.guides.strategy import DegreeRange, Strategy, advice_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """Hold one row: weights in 1e9 and devices that it is for, its advice, and its weak corner.

    `positions` are the least, and `experts` whether it is for mixtures of experts only.
    """

    id: str
    billions: tuple[float, float]
    devices: DegreeRange
    strategy: Strategy
    corner: str
    positions: int = 1
    experts: bool = False

    def covers(self, situation: Situation) -> bool:
        """Return whether a situation is inside of the ranges of the row."""
        (least, most), billions = self.billions, situation.num_parameters / 1e9
        return (
            least <= billions <= most
            and situation.num_devices in self.devices
            and situation.positions >= self.positions
            and (not self.experts or situation.model.experts is not None)
        )


SIZE_GUIDE = "llm-training, section 10"
"""Where the rows stand."""
SIZES = tuple(SizeRow(**row) for row in advice_rows("size"))


def rows_for(situation: Situation) -> tuple[SizeRow, ...]:
    """Return the rows whose ranges a situation is in."""
    return tuple(row for row in SIZES if row.covers(situation))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLayout:
    """Hold a layout that a guide names."""

    id: str
    """Its name in the list."""
    source: str
    """Where it stands."""
    name: str
    """What it is called there."""
    parameters: float
    """Weights psi of the model."""
    mesh: Mesh
    """Its mesh."""
    memory_bytes: float
    """Bytes of memory of a device."""
    zero: ZeroStage = 0
    """Its ZeRO stage."""
    expert_parameters: float = 0.0
    """Weights of `parameters` that are routed experts'."""

    @property
    def states_bytes(self) -> float:
        """Return the bytes of model state of a rank, in mixed precision."""
        mesh, data = self.mesh, self.mesh.dp * self.mesh.cp
        dense = (self.parameters - self.expert_parameters) / (mesh.tp * mesh.pp)
        total = model_states(dense, self.zero, data, MIXED_PRECISION).total
        if self.expert_parameters:
            share = self.expert_parameters / (mesh.pp * mesh.ep)
            total += model_states(share, self.zero, mesh.expert_shard_degree(expert_tp=1)).total
        return total

    @property
    def fits(self) -> bool:
        """Return whether the model states fit; activations come on top."""
        return self.states_bytes <= self.memory_bytes


NAMED = tuple(NamedLayout(**row) for row in advice_rows("layout"))
