"""The layouts of ZeRO that are proven: every stage, optimizer and place where slices rest.

Stage 0 to 3 x {dp 2, dp 4, replicate 2 x shard 2, dp2 x tp2, dp2 x pp2 under GPipe and 1F1B,
dp2 x tp2 x pp2} x accumulation {1, 3} x recompute {none, full} x {AdamW, SGD, Muon} x slices
{on the device, in host memory, in files} x {tied, untied}. What else ZeRO can be told turns with
the case: when gradients are reduced, whether and when parameters are freed, how far ahead and how
many at a time they are gathered, which of them are never cut, where the slices of parameters rest,
what decays, sequence parallelism, experts, and whether the data ranks of stage 0 are of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap

from echelon.core.mesh import Mesh
from echelon.core.plan import (
    DecayRule,
    Layout,
    OffloadTarget,
    OptimizerKind,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
    Zero,
    ZeroStage,
)
from echelon.proof.shrink import stages_of
from tests.walks.matrix.cases import (
    OPTIMIZERS,
    RECOMPUTE_POLICIES,
    STAGES,
    MatrixCase,
    varied_model,
    varied_optimizer,
    varied_zero,
    with_experts,
)

HOMES: tuple[OffloadTarget, ...] = ("none", "host", "nvme")
_DECAYS: tuple[DecayRule, ...] = ("matrices", "blocks", "all")

LAYOUTS: dict[str, tuple[Mesh, str]] = {
    "dp2": (Mesh(dp_shard=2), "1f1b"),
    "dp4": (Mesh(dp_shard=4), "1f1b"),
    "replicate2-shard2": (Mesh(dp_replicate=2, dp_shard=2), "1f1b"),
    "dp2-tp2": (Mesh(dp_shard=2, tp=2), "1f1b"),
    "dp2-pp2-gpipe": (Mesh(dp_shard=2, pp=2), "gpipe"),
    "dp2-pp2-1f1b": (Mesh(dp_shard=2, pp=2), "1f1b"),
    "dp2-tp2-pp2": (Mesh(dp_shard=2, tp=2, pp=2), "1f1b"),
}
"""Meshes by name, each with its pipeline schedule."""


@dataclass(frozen=True, slots=True)
class ZeroCase(MatrixCase):
    """Name one layout of ZeRO; `home` is where slices rest between uses."""

    stage: ZeroStage
    layout: str
    accumulation: int
    recompute: RecomputePolicy
    optimizer: OptimizerKind
    home: OffloadTarget
    tied: bool

    @property
    def name(self) -> str:
        parts = [f"zero{self.stage}", self.layout, "tied" if self.tied else "untied"]
        parts += [f"acc{self.accumulation}", self.recompute, self.optimizer]
        return "-".join([*parts, *([] if self.home == "none" else [self.home])])

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; at stage 0 every other one has replicas in the place of shards."""
        mesh = LAYOUTS[self.layout][0]
        if self.stage == 0 and self.seed % 2:
            return replace(mesh, dp_replicate=mesh.dp_shard, dp_shard=mesh.dp_replicate)
        return mesh

    def plan(self) -> Plan:
        mesh, seed = self.mesh, self.seed
        zero = _zero(self)
        # A stage holds one unit more than its largest has blocks, where that can be.
        counts = [1 + zero.unit_blocks] if mesh.pp == 1 else [zero.unit_blocks] * mesh.pp
        layout = Layout(
            mesh=mesh,
            microbatch_sequences=1 + seed % 2,
            pipeline=Pipeline(schedule=LAYOUTS[self.layout][1], stages=stages_of(counts)),
            sequence_parallel=mesh.tp > 1 and seed // 2 % 2 == 1,
            recompute=Recompute(policy=self.recompute, every=1 + seed // 3 % 2),
            zero=zero,
        )
        model = varied_model(seed // 5, tp=mesh.tp, layers=sum(counts), tied=self.tied)
        decay = _DECAYS[seed // 7 % len(_DECAYS)]
        optimizer = replace(varied_optimizer(seed), kind=self.optimizer, decay=decay)
        # 1F1B needs a microbatch per stage.
        count = max(self.accumulation, mesh.pp)
        plan = self.plan_of(layout, count, model=model, optimizer=optimizer)
        return with_experts(plan, self.seed // 16384)


def zero_cases() -> Iterator[ZeroCase]:
    """Return every case of ZeRO; at stage 0 there are no slices that could rest elsewhere."""
    dimensions = (LAYOUTS, (1, 3), RECOMPUTE_POLICIES, OPTIMIZERS, HOMES, (False, True))
    every = starmap(ZeroCase, product(STAGES, *dimensions))
    return (case for case in every if case.stage or case.home == "none")


def _zero(case: ZeroCase) -> Zero:
    seed = case.seed // 64
    parameters = case.stage == 3 and seed // 144 % 3
    return replace(
        varied_zero(case.stage, seed),
        optimizer_offload=case.home,
        parameter_offload=case.home if parameters else "none",
        offload_buffers=2 + seed // 2 % 2,
    )
