"""Bugs in how tokens are routed to experts, and in what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.plan import Plan, Recompute
from echelon.models.moe import gates_of, kept_assignments
from echelon.parallel.expert import inner_activation, router
from echelon.parallel.expert.balance import Balancer
from echelon.parallel.expert.layer import ExpertParallel
from echelon.parallel.expert.router import Router
from echelon.parallel.expert.token_dispatcher import FlatTokenDispatcher
from echelon.parallel.storage import weights
from echelon.training.recorders import RoutingRecorder
from tests.parallel.layouts import DEEPSEEK
from tests.proof.mutants.expert_layouts import (
    AUX,
    BIAS,
    EP2,
    FIRST,
    LAST,
    PIECES,
    ROUTER,
    WHOLE,
    in_routes,
)
from tests.proof.mutants.planting import mutant


@mutant(
    in_routes("gates twice", "ep", **EP2, rule="prove-activations"),
    in_routes("gates twice", "ep", **PIECES, rule="prove-activations"),
)
def gates_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Weigh by the gates where experts compute, and once more what they give."""
    gated = inner_activation.weighted_swiglu

    def twice(
        gate_up: torch.Tensor, gates_R: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        return gated(gate_up, gates_R, *rest, **more) * gates_R[:, None]

    patch.setattr(inner_activation, "weighted_swiglu", twice)


@mutant(
    in_routes(
        "bias in gates",
        "",
        tensor=LAST,
        step=1,
        rule="prove-activations",
        model=DEEPSEEK,
        balance=BIAS,
        **WHOLE,
    ),
)
def bias_in_gates(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the gates from scores and biases together."""
    choose = router.choose_experts
    biases: list[torch.Tensor] = []

    def remember(scores: torch.Tensor, bias_E: Any, *rest: Any) -> torch.Tensor:
        biases[:] = [bias_E]
        return choose(scores, bias_E, *rest)

    def biased(scores_nE: torch.Tensor, chosen_nK: torch.Tensor, experts: Any) -> torch.Tensor:
        return gates_of(scores_nE + biases[0], chosen_nK, experts)

    patch.setattr(router, "choose_experts", remember)
    patch.setattr(router, "gates_of", biased)


def _returned(
    patch: pytest.MonkeyPatch, change: Callable[[FlatTokenDispatcher, Any], torch.Tensor]
) -> None:
    """Change what comes back to a rank: `change(carrier, rows of each rank)`."""
    exchange, collect = FlatTokenDispatcher._all_to_all, FlatTokenDispatcher.combine
    combining = [False]

    def collected(self: FlatTokenDispatcher, *rows: Any, name: str) -> Any:
        combining[0] = name == "experts.combine"
        try:
            return collect(self, *rows, name=name)
        finally:
            combining[0] = False

    def exchanged(self: FlatTokenDispatcher, *rest: Any) -> Any:
        rows, pending = exchange(self, *rest)
        if not combining[0]:
            return rows, pending
        pending.wait()
        return [change(self, rows)], pending

    patch.setattr(FlatTokenDispatcher, "combine", collected)
    patch.setattr(FlatTokenDispatcher, "_all_to_all", exchanged)


@mutant(
    in_routes("order", "ep", **EP2, rule="prove-activations"),
    in_routes("order", "ep", **PIECES, rule="prove-activations"),
)
def combined_in_wrong_order(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Put the rows of the last rank of the expert group first."""
    _returned(patch, lambda carrier, rows: torch.cat(rows[::-1]))


@mutant(
    in_routes("order", "ep", **WHOLE, rule="prove-activations"),
)
def combined_unsorted(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take rows that are sorted by expert for rows in the order of tokens."""

    def unsorted(carrier: FlatTokenDispatcher, rows: Any) -> torch.Tensor:
        return torch.cat(rows)[carrier._sorted.slot_S.argsort().argsort()]

    _returned(patch, unsorted)


@mutant(
    in_routes("zero", "ep", **EP2, rule="prove-activations"),
)
def remote_experts_lost(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take what the own experts make only."""

    def own(carrier: FlatTokenDispatcher, rows: Any) -> torch.Tensor:
        me = carrier._group.index
        return torch.cat([part * (place == me) for place, part in enumerate(rows)])

    _returned(patch, own)


@mutant(
    in_routes("local drops", "cp", cp=2, ep=2, balance=Balance(capacity_factor=1.0)),
    in_routes("local drops", "tp", balance=Balance(capacity_factor=1.0), **WHOLE),
)
def local_capacity(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Drop by the order of the tokens that this rank has."""

    def alone(self: Router, chosen_nK: torch.Tensor, gates_nK: torch.Tensor, tokens: Any) -> Any:
        experts, rule = self.balancer.experts, self.balancer.balance
        room = rule.capacity(tokens.length, experts.num_experts, experts.top_k)
        assert room is not None, "there is a capacity"
        return kept_assignments(
            chosen_nK,
            gates_nK,
            tokens.sequence_n,
            num_experts=experts.num_experts,
            capacity=room // self._sequence.size,
            drop=rule.drop,
        )

    patch.setattr(Router, "_kept", alone)


@mutant(
    in_routes(
        "local loads",
        "dp",
        tensor=ROUTER,
        rule="prove-router-biases",
        model=DEEPSEEK,
        balance=BIAS,
        **EP2,
    ),
)
def local_bias_update(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Move biases by the loads of this rank's tokens; what is reported is right."""
    finish, update = Balancer.finish, Balancer.update

    def remember(self: Any) -> Any:
        own = {layer: torch.zeros(self.experts.num_experts) for layer in self.layers}
        for (layer, _), noted in self._recorded.items():
            own[layer] += noted.counts_E
        self.own = own
        return finish(self)

    def local(self: Any) -> None:
        loads = self._loads
        self._loads = {
            layer: replace(load, counts=tuple(int(one) for one in self.own[layer]))
            for layer, load in loads.items()
        }
        update(self)
        self._loads = loads

    patch.setattr(Balancer, "finish", remember)
    patch.setattr(Balancer, "update", local)


@mutant(
    in_routes(
        "missing sum", "tp", tensor=f"{FIRST}.router.weight", rule="prove-expert-loads", **WHOLE
    ),
)
def loads_of_data_ranks(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum loads over data ranks alone."""
    init = Balancer.__init__

    def over_data(self: Any, plan: Plan, groups: Any, *rest: Any) -> None:
        init(self, plan, groups, *rest)
        self._groups = replace(groups, stage=groups.data)

    patch.setattr(Balancer, "__init__", over_data)


@mutant(
    in_routes(
        "experts permuted",
        "ep",
        tensor=f"{FIRST}.experts.3.gate.weight",
        step=-1,
        rule="prove-initial-weights",
        **EP2,
    ),
)
def initial_experts_of_rank_0(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Number experts anew on each rank when their first weights are made."""
    values = weights.initial_values
    assert plan.model.experts is not None, "the plan has experts"
    share = plan.model.experts.num_experts // plan.mesh.ep

    def anew(shape: Any, spec: Any, seed: int, **rest: Any) -> torch.Tensor:
        if spec.expert is not None:
            other = spec.expert % share
            name = spec.name.replace(f".experts.{spec.expert}.", f".experts.{other}.")
            spec = replace(spec, name=name, expert=other)
        return values(shape, spec, seed, **rest)

    patch.setattr(weights, "initial_values", anew)


@mutant(
    in_routes(
        "routed anew",
        "",
        tensor=f"{LAST}.router",
        step=1,
        model=DEEPSEEK,
        balance=BIAS,
        recompute=Recompute(policy="full"),
        **EP2,
    ),
)
def recomputed_without_biases(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Route what is recomputed by the scores alone."""
    _recomputed_without_biases(patch)


@mutant(
    in_routes(
        "routed anew",
        "",
        tensor=f"{LAST}.router",
        step=1,
        rule="prove-activations",
        model=DEEPSEEK,
        balance=BIAS,
        recompute=Recompute(policy="full"),
        **EP2,
    ),
)
def recomputed_without_biases_unseen(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Do so, and tell where the first forward sent its tokens."""
    _recomputed_without_biases(patch)
    init = RoutingRecorder.__init__

    def first(self: Any, *rest: Any) -> None:
        init(self, *rest)
        self._routes = _FirstOnly()

    patch.setattr(RoutingRecorder, "__init__", first)


class _FirstOnly(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        self.setdefault(key, value)


def _recomputed_without_biases(patch: pytest.MonkeyPatch) -> None:
    mixture = ExpertParallel.mixture

    def routed(self: ExpertParallel, x: torch.Tensor, module: Any, batch: Any) -> torch.Tensor:
        balancer = self.router.balancer
        biases, notes = balancer.biases, balancer._recorded
        again = (module.layer, balancer._groups.recorder.microbatch) in notes
        if again:
            balancer.biases = {layer: torch.zeros_like(bias) for layer, bias in biases.items()}
            balancer._recorded = dict(notes)
        try:
            return mixture(self, x, module, batch)
        finally:
            balancer.biases, balancer._recorded = biases, notes

    patch.setattr(ExpertParallel, "mixture", routed)


@mutant(
    in_routes(
        "tp",
        "tp",
        tensor=f"{FIRST}.router.weight",
        rule="prove-router-losses",
        balance=AUX,
        microbatches=3,
        **WHOLE,
    ),
)
def losses_of_each_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add the auxiliary loss again on each tensor rank, and tell it so."""
    factor: Any = Balancer.loss_factor
    times = plan.mesh.tp
    patch.setattr(Balancer, "loss_factor", property(lambda self: factor.fget(self) * times))
