# SPDX-License-Identifier: Apache-2.0
"""Wrong mixtures of experts, run on one device: gates, drops, and rows that come back in disorder.

Shape suffixes: N tokens (sequence first), D hidden, E experts, K experts of a token, S assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.moe import (
    Expert,
    MixtureOfExperts,
    ReferenceRouting,
    gates_of,
    kept_assignments,
    route_reference,
)
from echelon.models.operations import Operations
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.variants import Variant
from echelon.proof.causes.token_ranks import dispatched_tokens, token_rows
from echelon.proof.oracle.oracle import OracleStep

_ChangeRouting = Callable[[ReferenceRouting, MixtureOfExperts], ReferenceRouting]
"""From how tokens are routed to how they are routed by mistake."""

_ChangeGates = Callable[[ReferenceRouting, MixtureOfExperts], torch.Tensor]
"""From how tokens are routed to other gates."""

_Room = Callable[[Callable[[int], int]], int]
"""From the capacity for tokens of a length to the capacity that a rank uses by mistake."""

_ReorderRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the slots of rows as they leave, and the ranks of their experts, to which rows come back."""


class WrongMixture(Operations):
    """Route by mistake, or give each token what experts made of others."""

    def __init__(
        self, plan: Plan, route: _ChangeRouting | None = None, order: _ReorderRows | None = None
    ) -> None:
        """Change the routing by `route`, and the rows that come back to a rank by `order`."""
        self.plan, self.route, self.order = plan, route, order

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what each token gets, [N, D]."""
        routed = route_reference(x_ND, mixture, batch, self.routing)
        if self.route is not None:
            routed = self.route(routed, mixture)
        self.routing.routed[mixture.layer] = routed
        rows_SD = assignment_outputs(x_ND, mixture, routed)
        if self.order is not None:
            rows_SD = self._disordered(rows_SD, routed, mixture)
        return summed(rows_SD, x_ND, mixture)

    def _disordered(
        self, rows_SD: torch.Tensor, routed: ReferenceRouting, mixture: MixtureOfExperts
    ) -> torch.Tensor:
        assert self.order is not None, "there is an order"
        top_k = routed.chosen_NK.shape[1]
        chosen_S, kept_S = routed.chosen_NK.reshape(-1), routed.kept_NK.reshape(-1)
        share = mixture.routing.num_experts // self.plan.mesh.ep
        wrong_SD = torch.zeros_like(rows_SD)
        for tokens in dispatched_tokens(self.plan):
            slots = (tokens[:, None] * top_k + torch.arange(top_k)).reshape(-1)
            slots = slots[kept_S[slots]]
            slots = slots[chosen_S[slots].argsort(stable=True)]
            wrong_SD[slots] = rows_SD[self.order(slots, chosen_S[slots] // share)]
        return wrong_SD


def assignment_outputs(
    x_ND: torch.Tensor, mixture: MixtureOfExperts, routed: ReferenceRouting
) -> torch.Tensor:
    """Return what each expert of each token makes of it, weighted, [N * K, D]; 0 if dropped."""
    top_k = routed.chosen_NK.shape[1]
    rows_SD = x_ND.new_zeros(routed.chosen_NK.numel(), x_ND.shape[1])
    for name, expert in mixture.experts.items():
        token, place = torch.nonzero((routed.chosen_NK == int(name)) & routed.kept_NK).unbind(-1)
        own, x_RD, gates_R = cast(Expert, expert), x_ND[token], routed.gates_NK[token, place]
        rows_SD = rows_SD.index_add(0, token * top_k + place, own.weighted(x_RD, gates_R))
    return rows_SD


def summed(rows_SD: torch.Tensor, x_ND: torch.Tensor, mixture: MixtureOfExperts) -> torch.Tensor:
    """Return the sum of what the experts of each token made, shared ones included, [N, D]."""
    y_ND = rows_SD.unflatten(0, (len(x_ND), -1)).sum(1)
    return y_ND + mixture.shared(x_ND) if hasattr(mixture, "shared") else y_ND


def expert_variants(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Return the mistakes of mixtures of experts in the forward pass, the most likely first."""
    experts, balance, biases = plan.model.experts, plan.mathematics.balance, oracle.routing.biases
    if experts is None:
        return
    yield from _gates(plan, biases)
    if balance.capacity_factor is not None:
        says = "gates are renormalised over the experts that have room, after the drop"
        yield _variant(plan, ProofFinding("renormalised after drop", says), _renormalised)
    if balance.capacity_factor is not None:
        yield from _drops(plan)
    if plan.mesh.ep > 1:
        yield from _orders(plan)
        yield from _unreached(plan)
    if biases:
        none = {layer: torch.zeros_like(one) for layer, one in biases.items()}
        says = "biases take no part in the choice of experts"
        finding = ProofFinding("no bias", says, tensor=_first_mixture(plan))
        yield Variant(finding, routing=replace(oracle.routing, biases=none))


def _gates(plan: Plan, biases: Mapping[int, torch.Tensor]) -> Iterator[Variant]:
    axis = "ep" if plan.mesh.ep > 1 else ""

    def variant(factor: str, says: str, axis: str, gates: _ChangeGates) -> Variant:
        return _variant(
            plan,
            ProofFinding(factor, says, axis),
            lambda routed, mixture: replace(routed, gates_NK=gates(routed, mixture)),
        )

    def biased(routed: ReferenceRouting, mixture: MixtureOfExperts) -> torch.Tensor:
        scores_NE = routed.scores_NE + biases[mixture.layer]
        return gates_of(scores_NE, routed.chosen_NK, mixture.routing)

    says = "gates weigh what experts make of a token twice"
    yield variant("gates twice", says, axis, lambda routed, _: routed.gates_NK.square())
    says = "gates do not weigh what experts make of a token"
    yield variant("no gates", says, axis, lambda routed, _: torch.ones_like(routed.gates_NK))
    if biases:
        says = "biases take part in the gates, not only in the choice of experts"
        yield variant("bias in gates", says, "", biased)
    says = "gates are the scores as they are: not renormalised, not scaled"
    yield variant(
        "plain gates", says, "", lambda routed, _: routed.scores_NE.gather(-1, routed.chosen_NK)
    )


def _renormalised(routed: ReferenceRouting, mixture: MixtureOfExperts) -> ReferenceRouting:
    """Let the gates of what is kept add up to what the gates of all did."""
    kept_NK = routed.gates_NK * routed.kept_NK
    total_N1 = kept_NK.sum(-1, keepdim=True)
    gates_NK = kept_NK / total_N1.where(total_N1 > 0, 1.0) * mixture.routing.gate_scale
    return replace(routed, gates_NK=gates_NK)


def _drops(plan: Plan) -> Iterator[Variant]:
    """Decide on drops by the tokens of each rank alone, with all of the room or its part."""
    rows, cp, tp = token_rows(plan), plan.mesh.cp, plan.mesh.tp
    scopes: list[tuple[str, tuple[str, ...], int]] = []
    if cp > 1 and tp > 1:
        scopes.append(("cp and tp", ("sequence", "context", "tensor"), cp * tp))
    if cp > 1:
        scopes.append(("cp", ("sequence", "context"), cp))
    if tp > 1:
        scopes.append(("tp", ("data", "microbatch", "context", "sequence", "tensor"), tp))
    length = plan.mathematics.sequence_length
    for axis, names, degree in scopes:
        says = "what an expert drops is decided by the order of each rank's own tokens"
        rooms: list[tuple[str, _Room]] = [
            ("", lambda room: room(length)),
            (" in its part of the room", lambda room, parts=degree: room(length // parts)),
            (
                " in its part of the room, rounded down",
                lambda room, parts=degree: room(length) // parts,
            ),
        ]
        for how, room in rooms:
            route = _drop_in(plan, rows.scope(*names), room)
            yield _variant(plan, ProofFinding("local drops", says + how, axis), route)
    yield _variant(
        plan,
        ProofFinding("no drops", "experts take tokens beyond their room"),
        lambda routed, _: replace(routed, kept_NK=torch.ones_like(routed.kept_NK)),
    )


def _drop_in(plan: Plan, scope_N: torch.Tensor, room: _Room) -> _ChangeRouting:
    balance = plan.mathematics.balance

    def route(routed: ReferenceRouting, mixture: MixtureOfExperts) -> ReferenceRouting:
        experts = mixture.routing

        def capacity(length: int) -> int:
            tokens = balance.capacity(length, experts.num_experts, experts.top_k)
            assert tokens is not None, "there is a capacity"
            return tokens

        kept_NK = kept_assignments(
            routed.chosen_NK,
            routed.gates_NK,
            scope_N,
            num_experts=experts.num_experts,
            capacity=room(capacity),
            drop=balance.drop,
        )
        return replace(routed, kept_NK=kept_NK)

    return route


def _orders(plan: Plan) -> Iterator[Variant]:
    ep = plan.mesh.ep

    def ranks_from(first: int, step: int) -> _ReorderRows:
        order = [(first + step * i) % ep for i in range(ep)]
        return lambda slots, rank: torch.cat([slots[rank == one] for one in order])

    orders: list[tuple[str, _ReorderRows]] = [
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
        yield _variant(plan, ProofFinding("order", says, "ep"), None, order)


def _unreached(plan: Plan) -> Iterator[Variant]:
    """Leave out what the experts of one share, or of all but a rank's own, make."""
    ep = plan.mesh.ep
    rows = token_rows(plan)
    fold_N = rows.data_N % plan.mesh.dp_shard * plan.mesh.cp + rows.context_N
    if plan.layout.experts.expert_tp == 1:
        fold_N = fold_N * plan.mesh.tp + rows.tensor_N

    def only(lost: int | None) -> _ChangeRouting:
        def route(routed: ReferenceRouting, mixture: MixtureOfExperts) -> ReferenceRouting:
            share_NK = routed.chosen_NK // (mixture.routing.num_experts // ep)
            away_NK = share_NK != (fold_N % ep)[:, None] if lost is None else share_NK == lost
            return replace(routed, kept_NK=routed.kept_NK & ~away_NK)

        return route

    for lost in (None, *range(ep)):
        whose = "of other ranks" if lost is None else f"of ep {lost}"
        says = f"what the experts {whose} make does not come back"
        yield _variant(plan, ProofFinding("zero", says, "ep"), only(lost))


def _variant(
    plan: Plan,
    finding: ProofFinding,
    route: _ChangeRouting | None,
    order: _ReorderRows | None = None,
) -> Variant:
    told = replace(finding, tensor=_first_mixture(plan))
    return Variant(told, WrongMixture(plan, route, order))


def _first_mixture(plan: Plan) -> str:
    """Return the name of the first mixture."""
    layers = range(plan.model.layers)
    return f"layers.{next(i for i in layers if plan.model.layer_has_experts(i))}.mlp"
