"""The expert parallelism that is proven: every axis that it folds over, every balance and load.

ep {2, 4} x {alone, twice as many data ranks, replicas, tp2 with and without sequence parallelism,
experts cut by tp2, pp2 under 1F1B, cp2 (its kinds in turn), ZeRO 0 to 3 of all other parameters x
ZeRO 0 to 3 of experts} x {auxiliary loss, bias} x {dropless, capacity} x {even loads, an expert
without tokens, all tokens to the same experts, by scores}. What else there is turns with the case:
the model (Mixtral, DeepSeek with groups, shared experts and a dense block, with and without latent
attention, Qwen without renormalised gates), over what the auxiliary loss is, a z-loss, both
balances at once, who is dropped, chunks, padding, two hops, recompute, accumulation, the optimizer,
where slices rest, another schedule, and ranks that hold the same experts. The largest meshes have
eight ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from echelon.core.cluster import Cluster
from echelon.core.experts import AuxiliaryScope, Balance, BalanceKind, ExpertLayout, RouteKind
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.plan import (
    Context,
    Home,
    Layout,
    Mathematics,
    Pipeline,
    Plan,
    Recompute,
    Zero,
    ZeroStage,
)
from echelon.prove.cases import MAX_WORLD, one_machine, turn_of, turned_optimizer
from echelon.prove.pipeline_cases import KINDS, OPTIMIZERS

Load = Literal["even", "empty", "one", "scores"]

EP = (2, 4)
PLAIN = ("alone", "dp2", "replicas2", "tp2", "tp2sp", "expert_tp2", "pp2", "cp2")
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
BESIDE = (*PLAIN, *(f"zero{dense}{experts}" for dense, experts in product(STAGES, repeat=2)))
BALANCES: tuple[BalanceKind, ...] = ("aux", "bias")
LOADS: tuple[Load, ...] = ("even", "empty", "one", "scores")
_ROUTES: dict[Load, RouteKind] = {
    "even": "even",
    "empty": "not-last",
    "one": "one",
    "scores": "scores",
}
_SCOPES: tuple[AuxiliaryScope, ...] = ("global", "sequence", "microbatch")
_SCHEDULES = ("1f1b", "1f1b", "zb-h1", "gpipe")
_HOMES: tuple[Home, ...] = ("none", "host", "nvme")
_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCase:
    """Name one way to share out experts."""

    ep: int
    beside: str
    balance: BalanceKind
    capacity: bool
    load: Load

    @property
    def name(self) -> str:
        """Return a name that is unique in the matrix."""
        room = "capacity" if self.capacity else "dropless"
        return "-".join(["expert", f"ep{self.ep}", self.beside, self.balance, room, self.load])

    @property
    def turn(self) -> int:
        """Return a number that depends on the name: it picks what is not a dimension."""
        return turn_of(self.name)

    @property
    def zero_stages(self) -> tuple[ZeroStage, ZeroStage]:
        """Return the ZeRO stage of all other parameters, and that of experts."""
        if not self.beside.startswith("zero"):
            return 0, 0
        dense, experts = self.beside[-2:]
        return STAGES[int(dense)], STAGES[int(experts)]

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; where there is room, every other one holds each expert twice."""
        ep, twice = self.ep, 1 + self.turn % 2
        match self.beside:
            case "alone":
                return Mesh(dp_shard=ep, ep=ep)
            case "replicas2":
                return Mesh(dp_replicate=2, dp_shard=ep, ep=ep)
            case "tp2" | "tp2sp":
                return Mesh(dp_shard=ep // 2 * twice, tp=2, ep=ep)
            case "expert_tp2":
                return Mesh(dp_shard=ep, tp=2, ep=ep)
            case "pp2":
                return Mesh(pp=2, dp_shard=ep, ep=ep)
            case "cp2":
                return Mesh(dp_shard=ep // 2 * twice, cp=2, ep=ep)
            case _:
                return Mesh(dp_shard=2 * ep, ep=ep)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.world_size

    def plan(self) -> Plan:
        """Return the plan of this case; it is small already, so shrinking leaves little to do."""
        return _plan(self)


def expert_cases() -> Iterator[ExpertCase]:
    """Return every case of expert parallelism."""
    for ep, beside, balance, capacity, load in product(EP, BESIDE, BALANCES, (False, True), LOADS):
        yield ExpertCase(ep=ep, beside=beside, balance=balance, capacity=capacity, load=load)


def _plan(case: ExpertCase) -> Plan:
    mesh, turn = case.mesh, case.turn // 2
    stages = ((0,), (1, 2)) if mesh.pp == 2 else ((0, 1),)
    microbatch, num_microbatches = 1 + turn % 2, (1, 2)[turn // 2 % 2] + mesh.pp - 1
    experts = _expert_layout(case)
    layout = Layout(
        mesh=mesh,
        microbatch_sequences=microbatch,
        pipeline=Pipeline(
            schedule=_SCHEDULES[turn // 4 % 4] if mesh.pp == 2 else "1f1b", stages=stages
        ),
        sequence_parallel=case.beside == "tp2sp" or (case.beside == "expert_tp2" and turn % 3 > 0),
        context=_context(case),
        recompute=Recompute(policy="full" if turn // 16 % 3 == 0 else "none"),
        zero=_zero(case),
        experts=experts,
    )
    layers = sum(len(stage) for stage in stages)
    mathematics = Mathematics(
        model=_model(case, layers),
        global_sequences=microbatch * mesh.dp * num_microbatches,
        sequence_length=_LENGTH,
        seed=turn % 1000,
        optimizer=replace(turned_optimizer(turn), kind=OPTIMIZERS[turn // 48 % 3]),
        balance=_balance(case),
    )
    return Plan(name=case.name, mathematics=mathematics, layout=layout, cluster=_cluster(case))


def _balance(case: ExpertCase) -> Balance:
    turn = case.turn // 256
    return Balance(
        kind="both" if case.balance == "bias" and turn % 3 == 0 else case.balance,
        aux_coefficient=0.1,
        aux_over=_SCOPES[turn // 3 % 3],
        z_coefficient=0.01 if turn // 9 % 2 else 0.0,
        bias_rate=0.05,
        capacity_factor=1.0 if case.capacity else None,
        drop="score" if turn // 18 % 2 else "position",
        route=_ROUTES[case.load],
    )


def _expert_layout(case: ExpertCase) -> ExpertLayout:
    """Return how tokens travel: in two hops where there are nodes to cross, padded where cut."""
    turn = case.turn // 512
    two_hop = case.ep == 4 and turn % 3 == 0
    return ExpertLayout(
        expert_tp=2 if case.beside == "expert_tp2" else 1,
        zero_stage=case.zero_stages[1],
        dispatch="two-hop" if two_hop else "flat",
        chunks=1 + turn // 3 % 2,
        padded=case.capacity and not two_hop and turn // 6 % 2 == 0,
    )


def _cluster(case: ExpertCase) -> Cluster:
    """Return nodes of which two hold the ranks that share out experts, where tokens cross any."""
    if _expert_layout(case).dispatch == "flat":
        return one_machine()
    per_node = 4 if case.beside == "expert_tp2" else 2
    return replace(one_machine(), devices_per_node=per_node, nodes=MAX_WORLD // per_node)


def _context(case: ExpertCase) -> Context:
    if case.mesh.cp == 1:
        return Context()
    kind = KINDS[case.turn // 128 % len(KINDS)]
    if kind == "ulysses-ring":
        return Context(kind=kind, ulysses_degree=1 + case.turn // 640 % 2)
    return Context(kind=kind, ulysses_degree=2 if kind == "ulysses" else 1)


def _zero(case: ExpertCase) -> Zero:
    turn, stage = case.turn // 64, case.zero_stages[0]
    if not stage:
        return Zero()
    home = _HOMES[turn % 3 if turn // 3 % 2 else 0]
    return Zero(
        stage=stage,
        accumulate="slices" if turn // 6 % 2 else "whole",
        reshard_after_forward=stage < 3 or turn // 12 % 3 > 0,
        prefetch=turn // 36 % 3,
        optimizer_offload=home,
        parameter_offload=home if stage == 3 and turn // 108 % 2 else "none",
    )


def _model(case: ExpertCase, layers: int) -> ModelShape:
    """Return one of four kinds of model, that `turn` picks, with a bias where one is moved."""
    turn, tp = case.turn // 1024, case.mesh.tp
    mixtral = ModelShape(
        name="matrix",
        layers=layers,
        hidden=32 * tp,
        heads=4 * tp,
        kv_heads=2 * tp,
        head_dim=8,
        ffn=16 * tp,
        vocab=24 * tp + 1,
        max_positions=_LENGTH,
        tied=turn // 4 % 4 == 0,
        dropout=0.1 if turn // 16 % 4 == 0 else 0.0,
        experts=Experts(num_experts=8, top_k=2, ffn=12, router_bias=case.balance == "bias"),
    )
    assert mixtral.experts is not None, "as written above"
    kind = turn % 4
    if kind == 0:
        return mixtral
    if kind == 1:
        raw = replace(mixtral.experts, num_experts=12, top_k=3, renormalise=False)
        return replace(mixtral, qk_norm=True, experts=raw)
    deepseek = replace(
        mixtral.experts,
        top_k=3,
        shared_experts=1 + turn // 64 % 2,
        first_dense_layers=1,
        router="sigmoid",
        router_bias=True,
        gate_scale=2.5,
        groups=4,
        top_groups=2,
    )
    if kind == 2:
        return replace(mixtral, experts=deepseek)
    latent = LatentAttention(
        query_rank=12,
        kv_rank=8,
        nope_dim=6,
        rope_dim=4,
        value_dim=(5, 6, 10)[turn // 128 % 3],
    )
    return replace(mixtral, kv_heads=4 * tp, head_dim=10, experts=deepseek, latent=latent)
