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
from itertools import product, starmap
from typing import Literal

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.cluster import Cluster
from echelon.core.experts import Balance, BalanceKind, ExpertLayout, RouteKind
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.plan import (
    Context,
    Layout,
    OffloadTarget,
    Pipeline,
    Plan,
    Recompute,
    Zero,
    ZeroStage,
)
from echelon.proof.shrink import stages_of
from tests.walks.matrix.cases import (
    AUXILIARY_SCOPES,
    MAX_WORLD,
    OPTIMIZERS,
    STAGES,
    MatrixCase,
    one_machine,
    varied_model,
    varied_optimizer,
)
from tests.walks.matrix.pipeline_cases import KINDS

Load = Literal["even", "empty", "one", "scores"]

EP = (2, 4)  # ranks
PLAIN = ("alone", "dp2", "replicas2", "tp2", "tp2sp", "expert_tp2", "pp2", "cp2")
EXPERT_COMBINATIONS = (
    *PLAIN,
    *(f"zero{dense}{experts}" for dense, experts in product(STAGES, repeat=2)),
)
_BALANCES: tuple[BalanceKind, ...] = ("aux", "bias")
LOADS: tuple[Load, ...] = ("even", "empty", "one", "scores")
_ROUTES: dict[Load, RouteKind] = {
    "even": "even",
    "empty": "not-last",
    "one": "one",
    "scores": "scores",
}
_SCHEDULES = ("1f1b", "1f1b", "zb-h1", "gpipe")
_HOMES: tuple[OffloadTarget, ...] = ("none", "host", "nvme")


@dataclass(frozen=True, slots=True)
class ExpertCase(MatrixCase):
    """Name one way to share out experts."""

    ep: int
    combination: str
    balance: BalanceKind
    capacity: bool
    load: Load

    @property
    def name(self) -> str:
        room = "capacity" if self.capacity else "dropless"
        return "-".join(["expert", f"ep{self.ep}", self.combination, self.balance, room, self.load])

    @property
    def zero_stages(self) -> tuple[ZeroStage, ZeroStage]:
        """Return the ZeRO stage of all other parameters, and that of experts."""
        if not self.combination.startswith("zero"):
            return 0, 0
        dense, experts = self.combination[-2:]
        return STAGES[int(dense)], STAGES[int(experts)]

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; where there is room, every other one holds each expert twice."""
        ep, folded = self.ep, self.ep // 2 * (1 + self.seed % 2)
        meshes = {
            "alone": Mesh(dp_shard=ep, ep=ep),
            "replicas2": Mesh(dp_replicate=2, dp_shard=ep, ep=ep),
            "tp2": Mesh(dp_shard=folded, tp=2, ep=ep),
            "tp2sp": Mesh(dp_shard=folded, tp=2, ep=ep),
            "expert_tp2": Mesh(dp_shard=ep, tp=2, ep=ep),
            "pp2": Mesh(pp=2, dp_shard=ep, ep=ep),
            "cp2": Mesh(dp_shard=folded, cp=2, ep=ep),
        }
        return meshes.get(self.combination, Mesh(dp_shard=2 * ep, ep=ep))

    def plan(self) -> Plan:
        mesh, seed = self.mesh, self.seed // 2
        counts = [1, 2] if mesh.pp == 2 else [2]
        schedule = _SCHEDULES[seed // 4 % 4] if mesh.pp == 2 else "1f1b"
        pieces_too = self.combination == "expert_tp2" and seed % 3 > 0
        layout = Layout(
            mesh=mesh,
            microbatch_sequences=1 + seed % 2,
            pipeline=Pipeline(schedule=schedule, stages=stages_of(counts)),
            sequence_parallel=self.combination == "tp2sp" or pieces_too,
            context=_context(self),
            recompute=Recompute(policy="full" if seed // 16 % 3 == 0 else "none"),
            zero=_zero(self),
            experts=_expert_layout(self),
        )
        plan = self.plan_of(
            layout,
            seed // 2 % 2 + mesh.pp,
            model=_model(self, sum(counts)),
            seed=seed % 1000,
            optimizer=replace(varied_optimizer(seed), kind=OPTIMIZERS[seed // 48 % 3]),
            balance=_balance(self),
        )
        return replace(plan, cluster=_cluster(self))


def expert_cases() -> Iterator[ExpertCase]:
    """Return every case of expert parallelism."""
    dimensions = (EP, EXPERT_COMBINATIONS, _BALANCES, (False, True), LOADS)
    return starmap(ExpertCase, product(*dimensions))


def _balance(case: ExpertCase) -> Balance:
    seed = case.seed // 256
    return Balance(
        kind="both" if case.balance == "bias" and seed % 3 == 0 else case.balance,
        aux_coefficient=0.1,
        aux_over=AUXILIARY_SCOPES[seed // 3 % 3],
        z_coefficient=0.01 if seed // 9 % 2 else 0.0,
        bias_rate=0.05,
        capacity_factor=1.0 if case.capacity else None,
        drop="score" if seed // 18 % 2 else "position",
        route=_ROUTES[case.load],
    )


def _expert_layout(case: ExpertCase) -> ExpertLayout:
    """Return how tokens travel: in two hops where there are nodes to cross, padded where cut."""
    seed = case.seed // 512
    two_hop = case.ep == 4 and seed % 3 == 0
    return ExpertLayout(
        expert_tp=2 if case.combination == "expert_tp2" else 1,
        zero_stage=case.zero_stages[1],
        dispatch="two-hop" if two_hop else "flat",
        chunks=1 + seed // 3 % 2,
        padded=case.capacity and not two_hop and seed // 6 % 2 == 0,
    )


def _cluster(case: ExpertCase) -> Cluster:
    """Return nodes of which two hold the ranks that share out experts, where tokens cross any."""
    if _expert_layout(case).dispatch == "flat":
        return one_machine()
    per_node = 4 if case.combination == "expert_tp2" else 2
    return replace(one_machine(), devices_per_node=per_node, nodes=MAX_WORLD // per_node)


def _context(case: ExpertCase) -> Context:
    if case.mesh.cp == 1:
        return Context()
    kind = KINDS[case.seed // 128 % len(KINDS)]
    degree = CONTEXT_KINDS[kind].exchange_degree(2, 1 + case.seed // 640 % 2)
    return Context(kind=kind, ulysses_degree=degree)


def _zero(case: ExpertCase) -> Zero:
    seed, stage = case.seed // 64, case.zero_stages[0]
    if not stage:
        return Zero()
    home = _HOMES[seed % 3 if seed // 3 % 2 else 0]
    return Zero(
        stage=stage,
        accumulate="slices" if seed // 6 % 2 else "whole",
        reshard_after_forward=stage < 3 or seed // 12 % 3 > 0,
        prefetch=seed // 36 % 3,
        optimizer_offload=home,
        parameter_offload=home if stage == 3 and seed // 108 % 2 else "none",
    )


def _model(case: ExpertCase, layers: int) -> ModelShape:
    """Return one of four kinds of model, that `seed` picks, with a bias where one is moved."""
    seed, tp = case.seed // 1024, case.mesh.tp
    mixtral = replace(
        varied_model(0, tp=tp, layers=layers, tied=seed // 4 % 4 == 0),
        dropout=0.1 if seed // 16 % 4 == 0 else 0.0,
        experts=Experts(num_experts=8, top_k=2, ffn=12, router_bias=case.balance == "bias"),
    )
    assert mixtral.experts is not None, "as written above"
    kind = seed % 4
    if kind == 0:
        return mixtral
    if kind == 1:
        raw = replace(mixtral.experts, num_experts=12, top_k=3, renormalise=False)
        return replace(mixtral, qk_norm=True, experts=raw)
    deepseek = replace(
        mixtral.experts,
        top_k=3,
        shared_experts=1 + seed // 64 % 2,
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
        query_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=(5, 6, 10)[seed // 128 % 3]
    )
    return replace(mixtral, kv_heads=4 * tp, head_dim=10, experts=deepseek, latent=latent)
