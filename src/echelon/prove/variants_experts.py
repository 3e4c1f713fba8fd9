"""Wrong mixtures of experts, run on one device: gates, drops, and rows that come back in disorder.

Shape suffixes: N tokens (sequence first), D hidden, E experts, K experts of a token, S assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch.nn import functional as fn

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.capacity import kept
from echelon.models.mixture_reference import Routed, RoutingNotes, route_reference
from echelon.models.moe import Expert, MixtureOfExperts
from echelon.models.operations import Operations
from echelon.models.routing import gates_of
from echelon.prove.diagnosis import Finding
from echelon.prove.expert_rows import dispatches, token_rows
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.variants import Variant

Reroute = Callable[[Routed, MixtureOfExperts, RoutingNotes], Routed]
"""From how tokens are routed to how they are routed by mistake."""

Order = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the slots of rows as they leave, and the ranks of their experts, to which rows come back."""


class WrongMixture(Operations):
    """Route by mistake, or give each token what experts made of others."""

    def __init__(
        self, plan: Plan, route: Reroute | None = None, order: Order | None = None
    ) -> None:
        """Change the routing by `route`, and the rows that come back to a rank by `order`."""
        self.plan, self.route, self.order = plan, route, order

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what each token gets, [N, D]."""
        routed = route_reference(x_ND, mixture, batch, self.routing)
        if self.route is not None:
            routed = self.route(routed, mixture, self.routing)
        self.routing.routed[mixture.layer] = routed
        rows_SD = assignments(x_ND, mixture, routed)
        if self.order is not None:
            rows_SD = self._disordered(rows_SD, routed, mixture)
        y_ND = rows_SD.unflatten(0, routed.chosen_NK.shape).sum(1)
        return y_ND + mixture.shared(x_ND) if hasattr(mixture, "shared") else y_ND

    def _disordered(
        self, rows_SD: torch.Tensor, routed: Routed, mixture: MixtureOfExperts
    ) -> torch.Tensor:
        assert self.order is not None, "there is an order"
        top_k = routed.chosen_NK.shape[1]
        chosen_S, kept_S = routed.chosen_NK.reshape(-1), routed.kept_NK.reshape(-1)
        share = mixture.routing.num_experts // self.plan.mesh.ep
        wrong_SD = torch.zeros_like(rows_SD)
        for tokens in dispatches(self.plan):
            slots = (tokens[:, None] * top_k + torch.arange(top_k)).reshape(-1)
            slots = slots[kept_S[slots]]
            slots = slots[chosen_S[slots].argsort(stable=True)]
            wrong_SD[slots] = rows_SD[self.order(slots, chosen_S[slots] // share)]
        return wrong_SD


def assignments(x_ND: torch.Tensor, mixture: MixtureOfExperts, routed: Routed) -> torch.Tensor:
    """Return what each expert of each token makes of it, weighted, [N * K, D]; 0 if dropped."""
    top_k = routed.chosen_NK.shape[1]
    rows_SD = x_ND.new_zeros(routed.chosen_NK.numel(), x_ND.shape[1])
    for name, expert in mixture.experts.items():
        token, place = torch.nonzero((routed.chosen_NK == int(name)) & routed.kept_NK).unbind(-1)
        made_RD = expert_output(cast(Expert, expert), x_ND[token], routed.gates_NK[token, place])
        rows_SD = rows_SD.index_add(0, token * top_k + place, made_RD)
    return rows_SD


def expert_output(expert: Expert, x_RD: torch.Tensor, gates_R: torch.Tensor) -> torch.Tensor:
    """Return what an expert makes of its rows, weighted."""
    inner_RF = fn.silu(expert.gate(x_RD)) * expert.up(x_RD)
    return expert.down((inner_RF * gates_R[:, None]).to(x_RD.dtype))


def expert_variants(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Return the mistakes of mixtures of experts in the forward pass, the most likely first."""
    experts, balance = plan.model.experts, plan.mathematics.balance
    if experts is None:
        return
    yield from _gates(plan, oracle)
    if balance.capacity_factor is not None:
        yield from _drops(plan, oracle)
    if plan.mesh.ep > 1:
        yield from _orders(plan, oracle)
        yield from _unreached(plan, oracle)
    if oracle.routing.biases:
        none = {layer: torch.zeros_like(one) for layer, one in oracle.routing.biases.items()}
        yield Variant(
            tensor=_mixture(plan),
            finding=Finding(factor="no bias", says="biases take no part in the choice of experts"),
            build=lambda: build_decoder(
                plan, oracle.before, routing=replace(oracle.routing, biases=none)
            ),
        )


def _gates(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    axis = "ep" if plan.mesh.ep > 1 else ""

    def twice(routed: Routed, _: MixtureOfExperts, __: RoutingNotes) -> Routed:
        return replace(routed, gates_NK=routed.gates_NK.square())

    def none(routed: Routed, _: MixtureOfExperts, __: RoutingNotes) -> Routed:
        return replace(routed, gates_NK=torch.ones_like(routed.gates_NK))

    def biased(routed: Routed, mixture: MixtureOfExperts, notes: RoutingNotes) -> Routed:
        scores_NE = routed.scores_NE + notes.biases[mixture.layer]
        return replace(routed, gates_NK=gates_of(scores_NE, routed.chosen_NK, mixture.routing))

    def plain(routed: Routed, _: MixtureOfExperts, __: RoutingNotes) -> Routed:
        return replace(routed, gates_NK=routed.scores_NE.gather(-1, routed.chosen_NK))

    says = "gates weigh what experts make of a token twice"
    yield _variant(plan, oracle, Finding(factor="gates twice", says=says, axis=axis), twice)
    says = "gates do not weigh what experts make of a token"
    yield _variant(plan, oracle, Finding(factor="no gates", says=says, axis=axis), none)
    if oracle.routing.biases:
        says = "biases take part in the gates, not only in the choice of experts"
        yield _variant(plan, oracle, Finding(factor="bias in gates", says=says), biased)
    says = "gates are the scores as they are: not renormalised, not scaled"
    yield _variant(plan, oracle, Finding(factor="plain gates", says=says), plain)


def _drops(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Decide on drops by the tokens of each rank alone, with all of the room or its part."""
    rows = token_rows(plan)
    scopes: list[tuple[str, tuple[str, ...], int]] = []
    if plan.mesh.cp > 1:
        scopes.append(("cp", ("sequence", "context"), plan.mesh.cp))
    if plan.mesh.tp > 1:
        scopes.append(("tp", ("data", "microbatch", "context", "sequence", "tensor"), plan.mesh.tp))
    if len(scopes) == 2:
        both = ("sequence", "context", "tensor")
        scopes.insert(0, ("cp and tp", both, plan.mesh.cp * plan.mesh.tp))
    for axis, names, degree in scopes:
        for parts in (1, degree):
            says = "what an expert drops is decided by the order of each rank's own tokens"
            says += " in its part of the room" if parts > 1 else ""
            yield _variant(
                plan,
                oracle,
                Finding(factor="local drops", says=says, axis=axis),
                _drop_in(plan, rows.scope(*names), parts),
            )
    yield _variant(
        plan,
        oracle,
        Finding(factor="no drops", says="experts take tokens beyond their room"),
        lambda routed, _, __: replace(routed, kept_NK=torch.ones_like(routed.kept_NK)),
    )


def _drop_in(plan: Plan, scope_N: torch.Tensor, parts: int) -> Reroute:
    balance, length = plan.mathematics.balance, plan.mathematics.sequence_length

    def route(routed: Routed, mixture: MixtureOfExperts, _: RoutingNotes) -> Routed:
        experts = mixture.routing
        room = balance.capacity(length // parts, experts.num_experts, experts.top_k)
        assert room is not None, "there is a capacity"
        kept_NK = kept(
            routed.chosen_NK,
            routed.gates_NK,
            scope_N,
            num_experts=experts.num_experts,
            capacity=room,
            drop=balance.drop,
        )
        return replace(routed, kept_NK=kept_NK)

    return route


def _orders(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    ep = plan.mesh.ep

    def ranks_from(first: int, step: int) -> Order:
        order = [(first + step * i) % ep for i in range(ep)]
        return lambda slots, rank: torch.cat([slots[rank == one] for one in order])

    orders: list[tuple[str, Order]] = [
        ("those of the last rank first", ranks_from(ep - 1, -1)),
        ("sorted by expert, not by token", lambda slots, _: slots[slots.argsort().argsort()]),
        ("sorted by token where they are sorted by expert", lambda slots, _: slots.sort().values),
    ]
    if ep > 2:
        orders += [
            (f"those of rank {shift} of the expert group first", ranks_from(shift, 1))
            for shift in range(1, ep)
        ]
    for how, order in orders:
        says = f"what experts made comes back in another order: {how}"
        yield _variant(plan, oracle, Finding(factor="order", says=says, axis="ep"), None, order)


def _unreached(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Leave out what the experts of one share, or of all but a rank's own, make."""
    ep = plan.mesh.ep
    rows = token_rows(plan)
    fold = [rows.data_N % plan.mesh.dp_shard, rows.context_N]
    fold_N = fold[0] * plan.mesh.cp + fold[1]
    if plan.layout.experts.expert_tp == 1:
        fold_N = fold_N * plan.mesh.tp + rows.tensor_N

    def only(own: bool, lost: int) -> Reroute:
        def route(routed: Routed, mixture: MixtureOfExperts, _: RoutingNotes) -> Routed:
            share_NK = routed.chosen_NK // (mixture.routing.num_experts // ep)
            away_NK = share_NK != (fold_N % ep)[:, None] if own else share_NK == lost
            return replace(routed, kept_NK=routed.kept_NK & ~away_NK)

        return route

    says = "what the experts of other ranks make does not come back"
    yield _variant(plan, oracle, Finding(factor="zero", says=says, axis="ep"), only(True, 0))
    for lost in range(ep):
        says = f"what the experts of ep {lost} make does not come back"
        yield _variant(
            plan, oracle, Finding(factor="zero", says=says, axis="ep"), only(False, lost)
        )


def _variant(
    plan: Plan,
    oracle: OracleStep,
    finding: Finding,
    route: Reroute | None,
    order: Order | None = None,
) -> Variant:
    return Variant(
        tensor=_mixture(plan),
        finding=finding,
        build=lambda: build_decoder(
            plan, oracle.before, WrongMixture(plan, route, order), routing=oracle.routing
        ),
    )


def _mixture(plan: Plan) -> str:
    """Return the name of the first mixture."""
    layers = range(plan.model.layers)
    return f"layers.{next(i for i in layers if plan.model.layer_has_experts(i))}.mlp"
