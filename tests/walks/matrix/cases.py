"""The layouts of data, tensor and pipeline parallelism that are proven, without ZeRO.

Data, tensor and pipeline degrees in {1, 2, 4} up to eight ranks, sequence parallelism, schedule,
even and uneven stages, tied and untied head, accumulation, recompute. The kind of model (norms,
biases, positions, head ratios, a vocabulary that `tp` does not divide, dropout) turns with the
case, so each meets each in the whole. Token counts are uneven everywhere.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, starmap
from typing import Any

from echelon.core.choices.optimizers import OPTIMIZERS as RECORDS
from echelon.core.cluster import Cluster, Device
from echelon.core.experts import AuxiliaryScope, Balance, BalanceKind, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts, ModelShape, RopeScaling
from echelon.core.plan import (
    Layout,
    Mathematics,
    Optimizer,
    OptimizerKind,
    Pipeline,
    Plan,
    Recompute,
    RecomputePolicy,
    Zero,
    ZeroStage,
)
from echelon.proof.shrink import stages_of

MAX_WORLD = 8  # ranks
DEGREES = (1, 2, 4)  # ranks of an axis
SCHEDULES = ("naive", "gpipe", "1f1b")
RECOMPUTE_POLICIES: tuple[RecomputePolicy, ...] = ("none", "full")
OPTIMIZERS: tuple[OptimizerKind, ...] = tuple(RECORDS)
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
AUXILIARY_SCOPES: tuple[AuxiliaryScope, ...] = ("global", "sequence", "microbatch")
_SMALL_ENOUGH = 512  # elements


@dataclass(frozen=True, slots=True)
class MatrixCase(ABC):
    """Name one layout that is proven; each family of cases has dimensions of its own."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return a name that is unique in the matrix."""

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """Return the mesh."""

    @property
    def seed(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.world_size

    @abstractmethod
    def plan(self) -> Plan:
        """Return the plan of this case; it is small already, so shrinking leaves little to do."""

    def plan_of(self, layout: Layout, num_microbatches: int, **mathematics: Any) -> Plan:
        """Return the plan of a layout that takes so many microbatches."""
        sequences = layout.microbatch_sequences * layout.mesh.dp * num_microbatches
        given = {"sequence_length": 16, "seed": self.seed % 1000, **mathematics}
        return Plan(
            name=self.name,
            mathematics=Mathematics(global_sequences=sequences, **given),
            layout=layout,
            cluster=one_machine(),
        )


@dataclass(frozen=True, slots=True)
class Case(MatrixCase):
    """Name one layout of the matrix of data, tensor and pipeline parallelism."""

    dp: int
    """Data-parallel degree."""
    tp: int
    """Tensor-parallel degree."""
    pp: int
    """Pipeline ranks."""
    sequence_parallel: bool
    """Whether the residual stream is cut over `tp`."""
    schedule: str
    """The pipeline schedule."""
    uneven_stages: bool
    """Whether stages have different numbers of blocks."""
    tied: bool
    """Whether the head is the embedding."""
    accumulation: int
    """Microbatches of a step: 1 for the fewest that the pipeline takes, else at least so many."""
    recompute: RecomputePolicy
    """Which blocks run forward again."""

    @property
    def name(self) -> str:
        parts = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [self.schedule, "uneven" if self.uneven_stages else "even"] if self.pp > 1 else []
        parts += ["tied" if self.tied else "untied", f"acc{self.accumulation}", self.recompute]
        return "-".join(parts)

    @property
    def mesh(self) -> Mesh:
        # Half of the cases have a data axis of both kinds: they must be one and the same sum.
        shard = 2 if self.dp == 4 and self.seed % 2 else 1
        return Mesh(pp=self.pp, dp_replicate=self.dp // shard, dp_shard=shard, tp=self.tp)

    def plan(self) -> Plan:
        counts = [2] if self.pp == 1 else [1] * self.pp
        if self.uneven_stages:
            counts[self.seed % self.pp] = 2
        layout = Layout(
            mesh=self.mesh,
            microbatch_sequences=1 + self.seed % 2,
            pipeline=Pipeline(schedule=self.schedule, stages=stages_of(counts)),
            sequence_parallel=self.sequence_parallel,
            recompute=Recompute(policy=self.recompute, every=1 + self.seed // 2 % 2),
        )
        model = varied_model(self.seed // 4, tp=self.tp, layers=sum(counts), tied=self.tied)
        optimizer = varied_optimizer(self.seed)
        return self.plan_of(layout, _num_microbatches(self), model=model, optimizer=optimizer)


def cases() -> Iterator[Case]:
    """Return every case of the matrix."""
    for dp, tp, pp in product(DEGREES, repeat=3):
        dimensions = product(
            (False, True) if tp > 1 else (False,),
            SCHEDULES if pp > 1 else ("1f1b",),
            (False, True) if pp > 1 else (False,),
            (False, True),
            (1, 3),
            RECOMPUTE_POLICIES,
        )
        if dp * tp * pp <= MAX_WORLD:
            yield from starmap(partial(Case, dp, tp, pp), dimensions)


def _num_microbatches(case: Case) -> int:
    """Return the fewest microbatches (1F1B needs one per stage), or more, and not in step."""
    fewest = case.pp if case.schedule == "1f1b" else 1
    if case.accumulation == 1:
        return fewest
    return max(case.accumulation, fewest + 1)


def varied_optimizer(seed: int) -> Optimizer:
    """Return AdamW with a clip, a schedule and a warm-up that `seed` picks."""
    return Optimizer(
        clip_norm=None if seed % 11 == 0 else 1.0,
        schedule=("cosine", "linear", "wsd", "constant")[seed // 8 % 4],
        warmup_steps=seed // 32 % 2 * 10,
        total_steps=100,
    )


def varied_zero(stage: ZeroStage, seed: int) -> Zero:
    """Return ZeRO at a stage, with gradients and parameters handled as `seed` picks."""
    if not stage:
        return Zero()
    zero = Zero(stage=stage, accumulate="slices" if seed % 2 else "whole")
    if stage < 3:
        return zero
    return replace(
        zero,
        reshard_after_forward=seed // 4 % 3 > 0,
        prefetch=seed // 12 % 3,
        unit_blocks=1 + seed // 36 % 2,
        keep_whole_below=seed // 72 % 2 * _SMALL_ENOUGH,
    )


def varied_model(seed: int, *, tp: int, layers: int, tied: bool) -> ModelShape:
    """Return one of four kinds of model, that `seed` picks."""
    llama = ModelShape(
        name="matrix",
        layers=layers,
        hidden=32 * tp,
        heads=4 * tp,
        kv_heads=2 * tp,
        head_dim=8,
        ffn=16 * tp,
        vocab=24 * tp + 1,
        max_positions=16,
        tied=tied,
    )
    kind = seed % 4
    if kind == 0:
        return llama
    if kind == 1:
        return replace(
            llama,
            kv_heads=4 * tp,
            vocab=24 * tp,
            max_positions=32,
            gated=False,
            activation="gelu",
            norm="layernorm",
            positions="learned",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )
    if kind == 2:
        return replace(llama, kv_heads=tp, qk_norm=True, qkv_bias=True, head_dim=16)
    scaling = RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
    )
    return replace(llama, dropout=0.1, rope_scaling=scaling, rope_theta=100.0)


def one_machine() -> Cluster:
    """Return a cluster that has room for every case."""
    device = Device(name="cpu", memory_bytes=8 * 2**30, memory_bandwidth=1e10)
    return Cluster(
        name="this machine",
        device=device,
        devices_per_node=MAX_WORLD,
        nodes=1,
        links=(),
        backend="gloo",
    )


_EXPERTS_EVERY = 5
"""One case of so many has experts, where its MLPs have a gate and no bias."""

_KINDS: tuple[BalanceKind, ...] = ("aux", "bias", "both")


def shared_out(layout: Layout, *, cut: bool, ep: int) -> Layout:
    """Return a layout with experts over `ep` ranks, and cut over tensor ranks, where it can be."""
    mesh = layout.mesh
    pieces = mesh.tp if cut else 1
    inner = mesh.dp_shard * mesh.cp * mesh.tp // pieces
    mesh = replace(mesh, ep=ep if inner % ep == 0 else 1)
    held_once = mesh.expert_shard_degree(expert_tp=pieces) == 1
    stage = 0 if held_once else layout.zero.stage
    return replace(layout, mesh=mesh, experts=ExpertLayout(expert_tp=pieces, zero_stage=stage))


def with_experts(plan: Plan, seed: int) -> Plan:
    """Return a plan whose blocks are mixtures of experts, where `seed` says so."""
    model, mesh = plan.model, plan.mesh
    if seed % _EXPERTS_EVERY or not model.gated or model.mlp_bias:
        return plan
    seed //= _EXPERTS_EVERY
    grouped = seed % 2 == 0
    experts = Experts(
        num_experts=8,
        top_k=2,
        ffn=8 * mesh.tp,
        shared_experts=seed // 2 % 2,
        first_dense_layers=seed // 4 % 2 if model.layers > 1 else 0,
        router="sigmoid" if grouped else "softmax",
        router_bias=True,
        groups=4 if grouped else 1,
        top_groups=2 if grouped else 1,
    )
    layout = shared_out(plan.layout, cut=seed // 8 % 2 == 1, ep=2 if seed // 16 % 4 else 1)
    balance = Balance(
        kind=_KINDS[seed // 64 % 3],
        aux_coefficient=0.1,
        aux_over=AUXILIARY_SCOPES[seed // 192 % 3],
        z_coefficient=0.01,
        bias_rate=0.05,
        capacity_factor=1.0 if seed // 576 % 2 else None,
    )
    mathematics = replace(plan.mathematics, model=replace(model, experts=experts), balance=balance)
    return replace(plan, mathematics=mathematics, layout=layout)
