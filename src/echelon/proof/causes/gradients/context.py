# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient looks like where a sequence is split over context ranks.

Sums over context ranks that are missing or weighted, and gradients of keys and values that did not
come home as they should: a key meets queries of every context rank, and what they give to its
gradient travels to the rank that holds it. One device does the same with a copy of the keys for
each ring place and each set of heads that meets them, so that what one of them gives can be moved,
lost or doubled on its way home.

Shape suffixes: T positions; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import product

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.layout.ring_transfers import ring_transfers
from echelon.models.attention.reference import ScoreForm, attention_reference
from echelon.proof.causes.factors import count_alike
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.attention import AttentionCall, WrongAttention, seen_by
from echelon.proof.causes.gradients.microbatch_weights import WrongGradientOfPlan
from echelon.proof.causes.token_ranks import (
    ContextPositions,
    DataContextRank,
    GradientParts,
    context_positions,
    copies_of,
    heads_of_member,
    loss_gradients_by_rank,
    row_gradients_by_rank,
    tokens_by_context_rank,
)
from echelon.proof.evidence.fits import EXPLAINED, fit_basis, nearly_equal
from echelon.proof.oracle.oracle import build_decoder, router_loss_gradient, whole_loss
from echelon.proof.ranks import ObservedShard

_KEYS = ("k", "v", "k_norm")
_ATTENDED = ("q", *_KEYS, "q_norm")


def context_rank_weights(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find weights of context ranks that make up a wrong gradient."""
    plan, reference = gradient.evidence.plan, gradient.evidence.reference_plan
    oracle, name = gradient.step, gradient.name
    if plan.mesh.cp == 1:
        return
    tokens = tokens_by_context_rank(reference, oracle.step)
    beside = router_loss_gradient(reference, oracle, name)
    for piece in gradient.wrong[:4]:
        here = plan.mesh.coordinates(piece.rank)[Axis.CP]
        found = _weights(piece, row_gradients_by_rank(reference, oracle, name))
        if found is not None:
            yield _mean_of_means(plan, *found, tokens) or _name_rows(*found, here)
            return
        found = _weights(piece, loss_gradients_by_rank(reference, oracle, name), beside)
        if found is not None:
            yield _mean_of_means(plan, *found, tokens) or _name_losses(*found)
            return


def gradients_of_keys(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find a wrong way home of the gradients of keys and values (and of exchanged queries)."""
    plan, oracle, name = gradient.evidence.reference_plan, gradient.step, gradient.name
    if plan.mesh.cp == 1 or _part_of_attention(name) not in _ATTENDED:
        return
    layer = name[: name.index(".attention.")]
    every = [f"{layer}.attention.{part}.weight" for part in _ATTENDED]
    names = [one for one in every if one in oracle.gradients]
    for way in gradient_misroutings(plan):
        operations = misrouted_attention(plan, way)
        model = build_decoder(
            plan, oracle.before, operations, routing=oracle.routing, rounding=oracle.rounding
        )
        parameters = [model.get_parameter(one) for one in names]
        found = torch.autograd.grad(whole_loss(plan, model, oracle), parameters)
        residual = _difference(gradient, dict(zip(names, found, strict=True)))
        if residual < EXPLAINED:
            yield replace(way.finding, residual=residual)
            return


def attribute_to_head_copies(plan: Plan, name: str, finding: ProofFinding) -> ProofFinding:
    """Point a factor of key/value gradients alone to the ranks that get copies of the heads."""
    copies = copies_of(plan) if plan.mesh.cp > 1 else 1
    if copies == 1 or _part_of_attention(name) not in _KEYS:
        return finding
    says = f"{finding.description}: the {copies} copies of a key/value head must be added up once"
    return replace(finding, factor=f"{finding.value:.6g}", description=says, axis="cp")


def _part_of_attention(name: str) -> str:
    return name.partition(".attention.")[2].partition(".")[0]


def _difference(gradient: WrongGradientOfPlan, found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest error of any piece, relative to the norm of its tensor."""
    observed, step = gradient.evidence.run, gradient.step.step
    return max(
        float((piece.tensor.double() - whole[piece.region]).norm())
        / max(float(whole.norm()), torch.finfo(torch.float64).tiny)
        for name, whole in found.items()
        for piece in observed.parts("gradients", step, name)
    )


def _weights(
    piece: ObservedShard, parts: GradientParts, beside: torch.Tensor | None = None
) -> tuple[dict[DataContextRank, float], float] | None:
    basis = [part[piece.region] for part in parts.values()]
    target = piece.tensor if beside is None else piece.tensor - beside[piece.region]
    weights, residual = fit_basis(target, basis)
    if residual >= EXPLAINED or all(nearly_equal(weight, 1.0) for weight in weights):
        return None
    return dict(zip(parts, weights, strict=True)), residual


def _name_rows(
    weights: Mapping[DataContextRank, float], residual: float, here: int
) -> ProofFinding:
    """Name weights of what the rows of each rank gave, in a gradient of context rank `here`."""
    zero = _lost(weights)
    kept = weights.keys() - zero
    if kept and {cp for _, cp in kept} == {here}:
        missing = {dp for dp, _ in weights} - {dp for dp, _ in kept}
        axis, over = ("dp and cp", "data and context") if missing else ("cp", "context")
        says = f"the part of cp {here} alone: the sum over {over} ranks is missing"
        return ProofFinding("missing sum", says, axis, residual=residual)
    lost = _lost_context_ranks(weights)
    if lost:
        return ProofFinding(
            "missing sum", f"the parts of cp {lost} are lost", "cp", residual=residual
        )
    says = f"a sum over context ranks with weights: {_describe_weights(weights)}"
    return ProofFinding("context ranks weighted", says, "cp", residual=residual)


def _lost(weights: Mapping[DataContextRank, float]) -> set[DataContextRank]:
    return {place for place, weight in weights.items() if nearly_equal(weight, 0.0)}


def _lost_context_ranks(weights: Mapping[DataContextRank, float]) -> list[int]:
    """Return the context ranks that lost something; none where all did, on one replica or more."""
    lost = {cp for _, cp in _lost(weights)}
    return [] if lost == {cp for _, cp in weights} else sorted(lost)


def _mean_of_means(
    plan: Plan,
    weights: Mapping[DataContextRank, float],
    residual: float,
    tokens: Mapping[DataContextRank, int],
) -> ProofFinding | None:
    """Find weights that go as one over the tokens of each rank."""
    if not count_alike(list(weights.values()), [tokens[place] for place in weights], EXPLAINED):
        return None
    says = "a mean of means: each context rank counts alike, whatever its tokens"
    axis = "cp" if plan.mesh.dp == 1 else "dp and cp"
    return ProofFinding("mean of means", says, axis, residual=residual)


def _name_losses(weights: Mapping[DataContextRank, float], residual: float) -> ProofFinding:
    """Name weights of the losses of each rank's positions."""
    lost = _lost_context_ranks(weights)
    factor = "zero" if lost else "context ranks weighted"
    says = f"the losses of context ranks have weights: {_describe_weights(weights)}"
    if lost:
        says = f"the losses of the positions of cp {lost} are left out"
    return ProofFinding(factor, says, "cp", residual=residual)


def _describe_weights(weights: Mapping[DataContextRank, float]) -> str:
    several = len({dp for dp, _ in weights}) > 1
    return ", ".join(
        f"{f'dp {dp} ' if several else ''}cp {cp} x {weight:.4g}"
        for (dp, cp), weight in weights.items()
    )


GradientRoute = Callable[[int, tuple[int, ...], torch.Tensor], torch.Tensor]
"""From whose queries gave a gradient (those of a ring place, of the heads of one member) and what
they gave for all positions, [T, B, its heads, hd], to what comes home."""


@dataclass(frozen=True, slots=True)
class GradientMisrouting:
    """One mistake: what it is, and the way home of gradients, of keys alone or queries too."""

    finding: ProofFinding
    way: GradientRoute
    _: KW_ONLY
    queries_too: bool = False


def misrouted_attention(plan: Plan, wrong: GradientMisrouting) -> WrongAttention:
    """Attend right, place by place and member by member, and bring gradients home by `wrong`."""
    positions = context_positions(plan.placement)
    members = range(plan.layout.context.ulysses_degree)

    def attend(call: AttentionCall) -> torch.Tensor:
        repeats = call.q.shape[2] // call.k.shape[2]
        seen = seen_by(call.shape, call.batch)
        out_THBd = torch.zeros_like(call.q).transpose(1, 2)
        for place, member in product(range(positions.placement.ring_degree), members):
            rows = (positions.ring_rank_T == place).nonzero()[:, 0]
            heads = tuple(heads_of_member(plan, member))
            way = partial(wrong.way, place, heads)
            kv_heads = [head // repeats for head in heads]
            k, v = (_sent(x[:, :, kv_heads], way) for x in (call.k, call.v))
            q = call.q[:, :, list(heads)]
            if wrong.queries_too:
                q = _sent(q, way)
            sinks = None if call.sinks_H is None else call.sinks_H[list(heads)]
            form = ScoreForm(scale=call.shape.score_scale, soft_cap=call.shape.soft_cap)
            found, _ = attention_reference(q[rows], k, v, seen[..., rows, :], form, sinks)
            where = (rows[:, None], torch.tensor(heads)[None, :])
            out_THBd = out_THBd.index_put(where, found.transpose(1, 2))
        return out_THBd.transpose(1, 2)

    return WrongAttention(attend)


def _sent(x: torch.Tensor, way: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return x; its gradient goes home by a way of its own."""
    sent = x.clone()
    if sent.requires_grad:
        sent.register_hook(way)
    return sent


def gradient_misroutings(plan: Plan) -> Iterator[GradientMisrouting]:
    """Return the wrong ways home, the most likely first."""
    places = context_positions(plan.placement)
    if places.placement.ring_degree > 1:
        yield from _other_places(places)
        yield from _lost_gradients(plan, places)
    if places.placement.ulysses_degree > 1:
        yield from _members(plan, places)


def _other_places(places: ContextPositions) -> Iterator[GradientMisrouting]:
    n, what = places.placement.ring_degree, "the gradients of keys and values"
    for shift in range(1, n):
        home = f"came home to the wrong context rank: place i of the ring got those of i + {shift}"
        home += f" (mod {n})"
        moved_T = places.moved(shift)
        yield _wrong("wrong rank", f"{what} {home}", _moved(moved_T))
        says = f"{what} that other ranks made {home}"
        yield _wrong("wrong rank", says, _moved_but_own(places, moved_T))
    says = f"{what} came home to the wrong context rank: cut in contiguous chunks"
    yield _wrong("wrong rank", says, _moved(places.contiguous_T))


def _moved(at_T: torch.Tensor) -> GradientRoute:
    return lambda place, heads, gradient: gradient[at_T]


def _moved_but_own(places: ContextPositions, moved_T: torch.Tensor) -> GradientRoute:
    def way(place: int, heads: tuple[int, ...], gradient: torch.Tensor) -> torch.Tensor:
        own = _column(places.ring_rank_T == place)
        return gradient * own + (gradient * ~own)[moved_T]

    return way


def _lost_gradients(plan: Plan, places: ContextPositions) -> Iterator[GradientMisrouting]:
    """Lose what others gave, all of it or what comes at one step; count it twice; lose the own."""
    what = "the gradients of keys and values that"

    def weighted(own: float, others: torch.Tensor | float) -> GradientRoute:
        def way(place: int, heads: tuple[int, ...], gradient: torch.Tensor) -> torch.Tensor:
            mine = places.ring_rank_T == place
            return gradient * _column(torch.where(mine, own, others))

        return way

    yield _wrong("missing sum", f"{what} other context ranks made are missing", weighted(1, 0))
    yield _wrong("2", f"{what} other context ranks made are added twice", weighted(1, 2))
    yield _wrong("missing sum", f"{what} each context rank made itself are missing", weighted(0, 1))
    if plan.layout.context.record.gathers_keys:
        return
    routes = ring_transfers(plan.placement, plan.model.mask)
    home = [one for one in routes.gradients if one.target == one.owner]
    for step in reversed(range(1, routes.degree + 1)):
        kept_T = torch.ones(places.placement.length)
        for transfer in (one for one in home if one.step == step):
            mine = places.ring_rank_T == transfer.owner
            for start, stop in transfer.rows:
                kept_T[mine & (places.row_T >= start) & (places.row_T < stop)] = 0.0
        says = f"{what} come home at step {step} of {routes.degree} are not waited for"
        yield _wrong("stale", says, weighted(1.0, kept_T))


def _members(plan: Plan, places: ContextPositions) -> Iterator[GradientMisrouting]:
    copies, few = copies_of(plan), plan.model.heads // plan.mesh.tp
    held = max(1, plan.model.kv_heads // plan.mesh.tp) * copies
    repeats = few // held

    def only(copy: int) -> GradientRoute:
        def way(place: int, heads: tuple[int, ...], gradient: torch.Tensor) -> torch.Tensor:
            kept = [head % few // repeats % copies == copy for head in heads]
            return gradient * torch.tensor(kept)[:, None]

        return way

    for copy in range(copies if copies > 1 else 0):
        says = f"copies of a key/value head are not added up: only copy {copy} counts"
        yield _wrong("missing sum", says, only(copy))
    if places.placement.ring_degree == 1:
        for shift in range(1, places.placement.ulysses_degree):
            moved_T = places.moved_ranks(shift)
            says = "the gradients of queries, keys and values came home to the wrong context rank: "
            says += f"rank i got those of i + {shift}"
            finding = ProofFinding("wrong rank", says, "cp")
            yield GradientMisrouting(finding, _moved(moved_T), queries_too=True)
            says = says.replace("queries, keys and values", "keys and values")
            yield _wrong("wrong rank", says, _moved(moved_T))


def _wrong(factor: str, says: str, way: GradientRoute) -> GradientMisrouting:
    return GradientMisrouting(ProofFinding(factor, says, "cp"), way)


def _column(weight_T: torch.Tensor) -> torch.Tensor:
    return weight_T[:, None, None, None]
