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
from itertools import product

from echelon.core.mesh import Mesh
from echelon.core.plan import (
    DecayRule,
    Home,
    Layout,
    Mathematics,
    OptimizerKind,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
    Zero,
    ZeroStage,
)
from echelon.prove.cases import POLICIES, one_machine, turn_of, turned_model, turned_optimizer
from echelon.prove.mixed_in import with_experts

STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
OPTIMIZERS: tuple[OptimizerKind, ...] = ("adamw", "sgd", "muon")
HOMES: tuple[Home, ...] = ("none", "host", "nvme")
DECAYS: tuple[DecayRule, ...] = ("matrices", "blocks", "all")

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

_SMALL_ENOUGH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCase:
    """Name one layout of ZeRO; `home` is where slices rest between uses."""

    stage: ZeroStage
    layout: str
    accumulation: int
    recompute: RecomputePolicy
    optimizer: OptimizerKind
    home: Home
    tied: bool

    @property
    def name(self) -> str:
        """Return a name that is unique in the matrix."""
        parts = [f"zero{self.stage}", self.layout, "tied" if self.tied else "untied"]
        parts += [f"acc{self.accumulation}", self.recompute, self.optimizer]
        return "-".join([*parts, *([] if self.home == "none" else [self.home])])

    @property
    def turn(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return turn_of(self.name)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; at stage 0 every other one has replicas in the place of shards."""
        mesh = LAYOUTS[self.layout][0]
        if self.stage == 0 and self.turn % 2:
            return replace(mesh, dp_replicate=mesh.dp_shard, dp_shard=mesh.dp_replicate)
        return mesh

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.world_size

    def plan(self) -> Plan:
        """Return the plan of this case; it is small already, so shrinking leaves little to do."""
        return _plan(self)


def zero_cases() -> Iterator[ZeroCase]:
    """Return every case of ZeRO; at stage 0 there are no slices that could rest elsewhere."""
    for stage, layout, accumulation, recompute, optimizer, home, tied in product(
        STAGES, LAYOUTS, (1, 3), POLICIES, OPTIMIZERS, HOMES, (False, True)
    ):
        if stage or home == "none":
            yield ZeroCase(
                stage=stage,
                layout=layout,
                accumulation=accumulation,
                recompute=recompute,
                optimizer=optimizer,
                home=home,
                tied=tied,
            )


def _plan(case: ZeroCase) -> Plan:
    mesh, turn = case.mesh, case.turn
    zero = _zero(case)
    # A stage holds one unit more than its largest has blocks, where that can be.
    per_stage = 1 + zero.unit_blocks if mesh.pp == 1 else zero.unit_blocks
    stages = tuple(
        tuple(range(stage * per_stage, (stage + 1) * per_stage)) for stage in range(mesh.pp)
    )
    microbatch = 1 + turn % 2
    layout = Layout(
        mesh=mesh,
        microbatch_sequences=microbatch,
        pipeline=Pipeline(schedule=LAYOUTS[case.layout][1], stages=stages),
        sequence_parallel=mesh.tp > 1 and turn // 2 % 2 == 1,
        recompute=Recompute(policy=case.recompute, every=1 + turn // 3 % 2),
        zero=zero,
    )
    layers = mesh.pp * per_stage
    # 1F1B needs a microbatch per stage.
    num_microbatches = max(case.accumulation, mesh.pp)
    mathematics = Mathematics(
        model=turned_model(turn // 5, tp=mesh.tp, layers=layers, tied=case.tied),
        global_sequences=microbatch * mesh.dp * num_microbatches,
        sequence_length=16,
        seed=turn % 1000,
        optimizer=replace(
            turned_optimizer(turn), kind=case.optimizer, decay=DECAYS[turn // 7 % len(DECAYS)]
        ),
    )
    plan = Plan(name=case.name, mathematics=mathematics, layout=layout, cluster=one_machine())
    return with_experts(plan, case.turn // 16384)


def _zero(case: ZeroCase) -> Zero:
    turn, sharded, whole = case.turn // 64, case.stage > 0, case.stage < 3
    zero = Zero(
        stage=case.stage,
        accumulate="slices" if sharded and turn % 2 else "whole",
        optimizer_offload=case.home,
        offload_buffers=2 + turn // 2 % 2,
    )
    if whole:
        return zero
    return replace(
        zero,
        reshard_after_forward=turn // 4 % 3 > 0,
        prefetch=turn // 12 % 3,
        unit_blocks=1 + turn // 36 % 2,
        keep_whole_below=turn // 72 % 2 * _SMALL_ENOUGH,
        parameter_offload=case.home if turn // 144 % 3 else "none",
    )
