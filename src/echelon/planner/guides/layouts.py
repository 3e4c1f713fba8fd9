"""Layouts that the guides name, and one of them as it was published, checked for fit.

The numbers of devices and degrees are the guides'; what each rank holds is computed. DeepSeek-V3
stands here as its report has it (arXiv 2412.19437, section 3.2), not as guide 003 does (003-69).
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.mesh import Mesh
from echelon.core.plan import ZeroStage
from echelon.cost.model_states import MIXED, model_states


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLayout:
    """Hold a layout: psi weights, of which `experts` are routed, on a mesh of a device's memory."""

    id: str
    source: str
    name: str
    parameters: float
    mesh: Mesh
    memory_bytes: float
    zero: ZeroStage = 0
    expert_parameters: float = 0.0
    devices_per_node: int = 8

    @property
    def states_bytes(self) -> float:
        """Return the bytes of model state of a rank, in mixed precision."""
        mesh, data = self.mesh, self.mesh.dp * self.mesh.cp
        dense = (self.parameters - self.expert_parameters) / (mesh.tp * mesh.pp)
        total = model_states(dense, self.zero, data, MIXED).total
        if self.expert_parameters:
            share = self.expert_parameters / (mesh.pp * mesh.ep)
            total += model_states(share, self.zero, mesh.expert_shard_degree(expert_tp=1)).total
        return total

    @property
    def fits(self) -> bool:
        """Return whether the model states fit; activations come on top."""
        return self.states_bytes <= self.memory_bytes

    @property
    def tensor_ranks_cross(self) -> bool:
        """Return whether tensor ranks are on several nodes."""
        return self.mesh.tp > self.devices_per_node


NAMED = (
    NamedLayout(
        id="llama-70b-64",
        source="002, 3D example",
        name="Llama 70B on 64 H100",
        parameters=70e9,
        mesh=Mesh(tp=8, pp=4, dp_replicate=2),
        memory_bytes=80e9,
    ),
    NamedLayout(
        id="llama-70b-512",
        source="003, section 8",
        name="Llama 3 70B on 512",
        parameters=70e9,
        mesh=Mesh(tp=8, pp=4, dp_shard=16),
        memory_bytes=80e9,
        zero=1,
    ),
    NamedLayout(
        id="foundation-1024",
        source="002, applications",
        name="175B (ours) on 1,024 H100",
        parameters=175e9,
        mesh=Mesh(tp=8, pp=8, dp_shard=16),
        memory_bytes=80e9,
        zero=1,
    ),
    NamedLayout(
        id="fine-tuning-4",
        source="002, applications",
        name="7B with ZeRO 3 on 4 A100 40 GB",
        parameters=7e9,
        mesh=Mesh(dp_shard=4),
        memory_bytes=40e9,
        zero=3,
    ),
    NamedLayout(
        id="deepseek-v3-2048",
        source="arXiv 2412.19437",
        name="DeepSeek-V3 on 2,048 H800",
        parameters=671e9,
        expert_parameters=654e9,
        mesh=Mesh(pp=16, dp_shard=128, ep=64),
        memory_bytes=80e9,
        zero=1,
    ),
)
