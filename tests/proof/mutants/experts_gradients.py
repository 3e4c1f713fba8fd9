"""Bugs in the gradients of experts and routers, in their norm, and in who holds which slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Zero
from echelon.layout.buckets import slice_index
from echelon.models.moe import counts_of
from echelon.parallel import data
from echelon.parallel.data import GradientReduction
from echelon.parallel.expert.balance import Balancer
from echelon.parallel.expert.router import AttachLoss, Router
from echelon.parallel.storage import gradients
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import MoveRows, own_rows
from echelon.parallel.zero import ParameterGathering
from echelon.training import engine
from tests.parallel.layouts import MIXTRAL
from tests.proof.mutants.expert_layouts import (
    AUX,
    BY_SEQUENCE,
    EP2,
    EXPERT,
    FIRST,
    LAST,
    ONE_OF_EIGHT,
    PIECES,
    ROUTER,
    WHOLE,
    Z_LOSS,
    in_expert_gradients,
)
from tests.proof.mutants.planting import change_hops, change_routes, mutant


@mutant(
    in_expert_gradients(EXPERT, "1/dp", "dp", dp_shard=4, ep=2),
)
def divided_by_data_ranks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide the gradients of experts by the number of data ranks."""
    first_hop = GradientReduction._start_first_sum

    def divided(self: GradientReduction, bucket: Any, hops: list[Group]) -> Any:
        if bucket.plan.expert:
            bucket.gradients.div_(self._groups[False].data.size)
        return first_hop(self, bucket, hops)

    patch.setattr(GradientReduction, "_start_first_sum", divided)


@mutant(
    in_expert_gradients(EXPERT, "wrong group", "ep", **EP2),
)
def summed_over_data_ranks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum the gradients of experts over all data ranks, whatever experts they hold."""
    change_routes(patch, lambda route, groups: replace(route, data=groups.data), of=(True,))


@mutant(
    in_expert_gradients(EXPERT, "missing sum", "edp", dp_shard=4, ep=2),
)
def experts_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the gradients of experts as each of their ranks has them."""

    def alone(route: Any, groups: Any) -> Any:
        return replace(route, data=Group("edp", (groups.rank,), groups.rank, None, groups.recorder))

    change_routes(patch, alone, of=(True,))


def _losses_times(patch: pytest.MonkeyPatch, times: int) -> None:
    """Multiply the losses of routers in backward; what is told stays right."""
    backward = AttachLoss.backward

    def scaled(ctx: Any, dy_nK: torch.Tensor) -> Any:
        dy_nK, scale, none = backward(ctx, dy_nK)
        return dy_nK, scale * times, none

    patch.setattr(AttachLoss, "backward", staticmethod(scaled))


@mutant(
    in_expert_gradients(ROUTER, "zero", "", step=1, balance=AUX, **EP2),
)
def losses_forgotten(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Tell the losses of routers, and give no gradient of them."""
    _losses_times(patch, 0)


@mutant(
    in_expert_gradients(ROUTER, "tp", "tp", balance=Z_LOSS, microbatches=3, **WHOLE),
    in_expert_gradients(ROUTER, "tp", "tp", step=1, balance=AUX, microbatches=3, **WHOLE),
)
def losses_times_tp(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each tensor rank add the losses of routers whole."""
    _losses_times(patch, plan.mesh.tp)


@mutant(
    in_expert_gradients(ROUTER, "dp", "dp", step=1, balance=AUX, dp_shard=4, ep=2),
)
def losses_times_dp(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Forget to divide the losses of routers by the number of data ranks."""
    _losses_times(patch, plan.mesh.dp)


@mutant(
    in_expert_gradients(
        ROUTER, "microbatches", "microbatches", step=1, balance=AUX, pp=2, microbatches=3, **EP2
    ),
)
def losses_times_microbatches(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Forget to divide the losses of routers by the number of microbatches."""
    _losses_times(patch, plan.num_microbatches)


@mutant(
    in_expert_gradients(
        f"{FIRST}.router.weight",
        "local shares",
        "cp",
        rule="prove-router-losses",
        cp=2,
        ep=2,
        balance=BY_SEQUENCE,
    ),
    in_expert_gradients(
        f"{FIRST}.router.weight",
        "local shares",
        "tp",
        rule="prove-router-losses",
        balance=replace(AUX, aux_over="microbatch"),
        **WHOLE,
    ),
)
def local_shares(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the shares of the loads of the tokens that this rank routes."""

    def local(self: Router, layer: int, chosen_nK: torch.Tensor, tokens: Any) -> torch.Tensor:
        size = self.balancer.experts.num_experts
        by_sequence = self.balancer.balance.aux_over == "sequence"
        scope_n = tokens.sequence_n if by_sequence else torch.zeros_like(tokens.key_n)
        scopes = tokens.num_sequences if by_sequence else 1
        counts = counts_of(scope_n[:, None] * size + chosen_nK, scopes * size).view(scopes, size)
        return (counts.to(self.balancer.dtype) / counts.sum(-1, keepdim=True))[scope_n]

    patch.setattr(Router, "_shares", local)


@mutant(
    in_expert_gradients(
        ROUTER, "local shares", "dp and tp", step=1, balance=AUX, dp_shard=2, **WHOLE
    ),
)
def shares_of_own_loads(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Keep for the next auxiliary loss the loads of this rank's tokens; tell the right ones."""
    finish, update = Balancer.finish, Balancer.update
    route = Router.route

    def remember(self: Any) -> Mapping[int, Any]:
        self.own = {layer: torch.zeros(self.experts.num_experts) for layer in self.layers}
        for (layer, _), noted in self._recorded.items():
            self.own[layer] += noted.counts_E
        return finish(self)

    def kept(self: Any) -> None:
        update(self)
        self.locally = {layer: (own / own.sum()).to(self.dtype) for layer, own in self.own.items()}

    def routed(
        self: Any, x: torch.Tensor, weight: Any, layer: int, *rest: Any, **named: Any
    ) -> Any:
        shares = self.balancer.shares
        self.balancer.shares = getattr(self.balancer, "locally", shares)
        try:
            return route(self, x, weight, layer, *rest, **named)
        finally:
            self.balancer.shares = shares

    patch.setattr(Balancer, "finish", remember)
    patch.setattr(Balancer, "update", kept)
    patch.setattr(Router, "route", routed)


@mutant(
    in_expert_gradients(ROUTER, "missing sum", "tp", balance=AUX, **WHOLE),
)
def router_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Forget that each tensor rank routes its own tokens only."""
    change_hops(patch, lambda kind, hops, groups: [one for one in hops if one.axis != "tp"])


@mutant(
    in_expert_gradients(ROUTER, "missing sum", "tp", **PIECES),
)
def gates_of_one_piece(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the gradient of a gate from this rank's piece of the expert alone."""
    backward = MoveRows.backward

    def own(ctx: Any, dy: torch.Tensor) -> Any:
        if ctx.name != "experts.gates":
            return backward(ctx, dy)
        return dy[own_rows(dy.shape[0], ctx.group)], None, None, None

    patch.setattr(MoveRows, "backward", staticmethod(own))


@mutant(
    in_expert_gradients(
        f"{LAST}.experts.4.down.weight", "stale", "", step=1, model=ONE_OF_EIGHT, **WHOLE
    ),
)
def idle_experts_keep_gradients(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Write nothing where an expert has no tokens, not even zeros."""
    product = gradients.add_product

    def skipped(gradient: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, **rest: Any) -> None:
        if len(x):
            product(gradient, dy, x, **rest)

    patch.setattr(gradients, "add_product", skipped)


def _count(patch: pytest.MonkeyPatch, counts: Any) -> None:
    """Count a bucket in the norm where `counts(right, bucket, groups)` says so."""
    right = engine.is_first_copy

    def changed(bucket: Any, flat: Any, groups: Any) -> bool:
        return counts(right(bucket, flat, groups), bucket, groups)

    patch.setattr(engine, "is_first_copy", changed)


@mutant(
    in_expert_gradients("gradient norm", "partial norm", "ep", rule="prove-gradient-norm", **EP2),
)
def norm_without_remote_experts(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Count the experts of the first rank of each expert group alone."""
    _count(
        patch,
        lambda right, bucket, groups: (
            right and (not bucket.plan.expert or groups.expert.index == 0)
        ),
    )


@mutant(
    in_expert_gradients(
        "gradient norm",
        "partial norm",
        "tp",
        rule="prove-gradient-norm",
        model=replace(MIXTRAL, kv_heads=4),
        tp=4,
        ep=2,
    ),
)
def experts_counted_on_all_ranks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Count experts once for each tensor rank that holds them, as if they were cut."""
    _count(
        patch,
        lambda right, bucket, groups: right or (bucket.plan.expert and groups.data.index == 0),
    )


@mutant(
    in_expert_gradients(
        f"{FIRST}.experts.0.gate.weight",
        "doubled",
        "edp_shard",
        rule="prove-nothing-dropped",
        dp_shard=4,
        ep=2,
        zero=Zero(stage=1),
        experts=ExpertLayout(zero_stage=1),
    ),
)
def slices_by_dense_index(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give a rank the slice of experts that its place among all data ranks says."""

    def dense(plan: Plan, rank: int, *, expert: bool = False) -> int:
        index = slice_index(plan, rank)
        return index % data.shard_degree(plan, expert=True) if expert else index

    patch.setattr(data, "slice_index", dense)


@mutant(
    in_expert_gradients(
        EXPERT, "slices permuted", "edp_shard", dp_shard=4, ep=2, experts=ExpertLayout(zero_stage=2)
    ),
)
def slices_reversed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Number the slices of experts from the last rank to the first."""

    def turned(plan: Plan, rank: int, *, expert: bool = False) -> int:
        index = slice_index(plan, rank, expert=expert)
        return data.shard_degree(plan, expert=True) - 1 - index if expert else index

    patch.setattr(data, "slice_index", turned)


@mutant(
    in_expert_gradients(
        f"{LAST}.experts.0.gate.weight",
        "stale",
        "edp_shard",
        step=1,
        rule="prove-activations",
        dp_shard=4,
        ep=2,
        zero=Zero(stage=3),
        experts=ExpertLayout(zero_stage=3),
    ),
)
def stale_gathered_experts(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Gather the experts of the last block from slices that are one update old."""
    gather, end_pass = ParameterGathering._gather, ParameterGathering.end_pass
    kept: dict[str, torch.Tensor] = {}

    def remember(self: ParameterGathering) -> None:
        end_pass(self)
        kept.update({bucket.name: bucket.value_slice.clone() for bucket in self.sliced})

    def old(self: ParameterGathering, bucket: Any) -> None:
        fresh = bucket.value_slice
        if bucket.plan.expert and bucket.plan.names[0].startswith("layers.1."):
            bucket.value_slice = kept.get(bucket.name, fresh)
        gather(self, bucket)
        bucket.value_slice = fresh

    patch.setattr(ParameterGathering, "end_pass", remember)
    patch.setattr(ParameterGathering, "_gather", old)
