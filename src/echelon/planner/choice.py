"""One plan of a search as whole numbers, and the settings of a run file that give it."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.mesh import Mesh
from echelon.cost.lattice.numbers import LayoutNumbers
from echelon.cost.lattice.of_plan import schedule_number
from echelon.planner.choices import MOST_STAGE
from echelon.planner.pins import NO_RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Hold every choice of a plan; `recompute` is every how many blocks, 0 for none."""

    mesh: Mesh
    sequence_parallel: bool
    context: str
    ulysses: int
    expert_tp: int
    microbatch: int
    microbatches: int
    zero: int
    reshard: bool
    offload: bool
    schedule: str
    virtual: int
    recompute: int
    recomputed_share: float

    @property
    def devices(self) -> int:
        """Return how many devices it takes."""
        return self.mesh.world_size

    def settings(self, *, has_experts: bool) -> dict[str, object]:
        """Return the settings of a run file that say this; what has no effect is left out."""
        mesh = self.mesh
        found: dict[str, object] = {
            "mesh.pp": mesh.pp,
            "mesh.dp_replicate": mesh.dp_replicate,
            "mesh.dp_shard": mesh.dp_shard,
            "mesh.cp": mesh.cp,
            "mesh.tp": mesh.tp,
            "mesh.sequence_parallel": self.sequence_parallel,
            "batch.microbatch_sequences": self.microbatch,
            "zero.stage": self.zero,
            "pipeline.schedule": self.schedule,
            "pipeline.virtual_stages": self.virtual,
        }
        if self.zero == MOST_STAGE:
            found["zero.reshard_after_forward"] = "always" if self.reshard else "never"
        if self.offload:
            found["zero.optimizer_offload"] = "host"
        if self.recompute != NO_RECOMPUTE:
            found |= {"recompute.policy": "full", "recompute.every": self.recompute}
        if mesh.cp > 1:
            found["context.kind"] = self.context
            if self.context == "ulysses-ring":
                found["context.ulysses_degree"] = self.ulysses
        if has_experts:
            found |= {"mesh.ep": mesh.ep, "experts.expert_tp": self.expert_tp}
        return found

    def numbers(self) -> LayoutNumbers:
        """Return the choice as the formulas of the lattice read it."""
        mesh = self.mesh
        return LayoutNumbers(
            tp=float(mesh.tp),
            cp=float(mesh.cp),
            pp=float(mesh.pp),
            dp_shard=float(mesh.dp_shard),
            dp_replicate=float(mesh.dp_replicate),
            ep=float(mesh.ep),
            expert_tp=float(self.expert_tp),
            sequence_parallel=float(self.sequence_parallel),
            ulysses=float(self.ulysses),
            gathered=float(self.context == "gathered"),
            microbatch=float(self.microbatch),
            microbatches=float(self.microbatches),
            virtual=float(self.virtual),
            schedule=schedule_number(self.schedule),
            zero=float(self.zero),
            reshard=float(self.reshard),
            recompute=self.recomputed_share,
            offload=float(self.offload),
        )
