"""Backward passes whose gradients of keys and values come home wrong, run on one device.

A key meets queries of every context rank; what they give to its gradient travels to the rank that
holds it. One device does the same with a copy of the keys for each ring place and each set of heads
that meets them, so that what one of them gives can be moved, lost or doubled on its way home.

Shape suffixes: T positions; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.cost.context_routes import ring_routes
from echelon.models.attention.reference import attention_reference, visible
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.prove.context_places import (
    ContextPlaces,
    context_places,
    copies_of,
    heads_of_member,
)
from echelon.prove.diagnosis import Finding


@dataclass(frozen=True, slots=True)
class Giver:
    """Name whose queries gave a gradient: those of a ring place, of the heads of one member."""

    place: int
    heads: tuple[int, ...]


Way = Callable[[Giver, torch.Tensor], torch.Tensor]
"""From what a giver gave for all positions, [T, B, its heads, hd], to what comes home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongReturn:
    """One mistake: what it is, and the way home of gradients, of keys alone or queries too."""

    finding: Finding
    way: Way
    queries_too: bool = False


class Returned(Operations):
    """Attend right, and bring gradients home by a way of the caller's choice."""

    def __init__(self, plan: Plan, wrong: WrongReturn) -> None:
        """Take places, heads and members from `plan`."""
        self.places, self.wrong = context_places(plan.placement), wrong
        members = range(plan.layout.context.ulysses_degree)
        self.heads = [tuple(heads_of_member(plan, member)) for member in members]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return attention, place by place, member by member."""
        repeats = q.shape[2] // k.shape[2]
        seen = visible(batch.positions_T, batch.positions_T, shape.mask, batch.documents)
        out_THBd = torch.zeros_like(q).transpose(1, 2)
        for place in range(self.places.placement.ring_degree):
            rows = (self.places.place_T == place).nonzero()[:, 0]
            for heads in self.heads:
                giver = Giver(place, heads)
                kv_heads = [head // repeats for head in heads]
                own_k, own_v = (self._sent(x[:, :, kv_heads], giver) for x in (k, v))
                own_q = q[:, :, list(heads)]
                if self.wrong.queries_too:
                    own_q = self._sent(own_q, giver)
                found, _ = attention_reference(
                    own_q[rows], own_k, own_v, seen[..., rows, :], shape.soft_cap
                )
                where = (rows[:, None], torch.tensor(heads)[None, :])
                out_THBd = out_THBd.index_put(where, found.transpose(1, 2))
        return out_THBd.transpose(1, 2).reshape(q.shape[0] * q.shape[1], -1)

    def _sent(self, x: torch.Tensor, giver: Giver) -> torch.Tensor:
        """Return x; its gradient goes home by the wrong way."""
        sent = x.clone()
        if sent.requires_grad:
            sent.register_hook(partial(self.wrong.way, giver))
        return sent


def wrong_returns(plan: Plan) -> Iterator[WrongReturn]:
    """Return the wrong ways home, the most likely first."""
    places = context_places(plan.placement)
    if places.placement.ring_degree > 1:
        yield from _other_places(places)
        yield from _not_home(plan, places)
    if places.placement.ulysses_degree > 1:
        yield from _members(plan, places)


def _other_places(places: ContextPlaces) -> Iterator[WrongReturn]:
    n, what = places.placement.ring_degree, "the gradients of keys and values"
    for shift in range(1, n):
        home = f"came home to the wrong context rank: place i of the ring got those of i + {shift}"
        home += f" (mod {n})"
        moved_T = places.moved(shift)
        yield _wrong("wrong rank", f"{what} {home}", _moved(moved_T))
        says = f"{what} that other ranks made {home}"
        yield _wrong("wrong rank", says, partial(_moved_but_own, places, moved_T))
    says = f"{what} came home to the wrong context rank: cut in contiguous chunks"
    yield _wrong("wrong rank", says, _moved(places.contiguous_T))


def _moved(at_T: torch.Tensor) -> Way:
    return lambda giver, gradient: gradient[at_T]


def _moved_but_own(
    places: ContextPlaces, moved_T: torch.Tensor, giver: Giver, gradient: torch.Tensor
) -> torch.Tensor:
    own = _column(places.place_T == giver.place)
    return gradient * own + (gradient * ~own)[moved_T]


def _not_home(plan: Plan, places: ContextPlaces) -> Iterator[WrongReturn]:
    """Lose what others gave, all of it or what comes at one step; count it twice; lose the own."""
    what = "the gradients of keys and values that"

    def weighted(own: float, others: torch.Tensor | float) -> Way:
        def way(giver: Giver, gradient: torch.Tensor) -> torch.Tensor:
            mine = places.place_T == giver.place
            return gradient * _column(torch.where(mine, own, others))

        return way

    yield _wrong("missing sum", f"{what} other context ranks made are missing", weighted(1, 0))
    yield _wrong("2", f"{what} other context ranks made are added twice", weighted(1, 2))
    yield _wrong("missing sum", f"{what} each context rank made itself are missing", weighted(0, 1))
    if plan.layout.context.kind == "gathered":
        return
    routes = ring_routes(plan.placement, plan.model.mask)
    for step in reversed(range(1, routes.degree + 1)):
        kept_T = torch.ones(places.placement.length)
        for hop in routes.gradients:
            if hop.step == step and hop.target == hop.owner:
                for start, stop in hop.rows:
                    mine = places.place_T == hop.owner
                    kept_T[mine & (places.row_T >= start) & (places.row_T < stop)] = 0.0
        says = f"{what} come home at step {step} of {routes.degree} are not waited for"
        yield _wrong("stale", says, weighted(1.0, kept_T))


def _members(plan: Plan, places: ContextPlaces) -> Iterator[WrongReturn]:
    copies, few = copies_of(plan), plan.model.heads // plan.mesh.tp
    held = max(1, plan.model.kv_heads // plan.mesh.tp) * copies
    repeats = few // held

    def only(copy: int) -> Way:
        def way(giver: Giver, gradient: torch.Tensor) -> torch.Tensor:
            kept = [head % few // repeats % copies == copy for head in giver.heads]
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
            finding = Finding(factor="wrong rank", says=says, axis="cp")
            yield WrongReturn(finding=finding, way=_moved(moved_T), queries_too=True)
            says = says.replace("queries, keys and values", "keys and values")
            yield _wrong("wrong rank", says, _moved(moved_T))


def _wrong(factor: str, says: str, way: Way) -> WrongReturn:
    return WrongReturn(finding=Finding(factor=factor, says=says, axis="cp"), way=way)


def _column(weight_T: torch.Tensor) -> torch.Tensor:
    return weight_T[:, None, None, None]
