"""Rows of a split sequence that are taken for others, on one device: positions, labels, heads.

A context rank holds some positions; what is made from a position (its rotation, its vector, its
label, what dropout drops) must follow the placement, and heads that were exchanged for positions
must come back in their order.

Shape suffixes: T positions; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations, dropped
from echelon.prove.context_places import ContextPlaces, context_places, heads_of_member
from echelon.prove.diagnosis import Finding
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.variants import KeyValueHeads, Positions, Variant


class MovedRows(Operations):
    """Read the tokens of other positions, or give the logits of other positions to the labels."""

    def __init__(self, tokens_T: torch.Tensor | None, labels_T: torch.Tensor | None) -> None:
        """Read token `tokens_T[t]` at position t; label t meets the logits of `labels_T[t]`."""
        self.tokens_T, self.labels_T = tokens_T, labels_T

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x_ND of the tokens of other positions."""
        if self.tokens_T is None:
            return super().embed(weight_VD, positions, batch)
        x_ND = super().embed(weight_VD, None, batch)[_rows(self.tokens_T, batch.num_sequences)]
        if positions is None:
            return x_ND
        return x_ND + positions[batch.positions_T].repeat_interleave(batch.num_sequences, dim=0)

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits, those of other positions for each label."""
        logits_NV = super().logits(x_ND, weight_VD)
        if self.labels_T is None:
            return logits_NV
        return logits_NV[_rows(self.labels_T, logits_NV.shape[0] // len(self.labels_T))]


class MovedDropout(Operations):
    """Drop what other positions would drop."""

    def __init__(self, position_T: torch.Tensor) -> None:
        """Key the mask of position t by `position_T[t]`."""
        self.position_T = position_T

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x with other elements dropped."""
        rows = _rows(self.position_T, batch.num_sequences)
        return dropped(x_ND, rows, probability, site, batch)


class MovedHeads(Operations):
    """Give the output of each query head to another."""

    def __init__(self, heads: list[int]) -> None:
        """Give head h what `heads[h]` found."""
        self.heads = heads

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return attention with its heads in another order."""
        out = super().attend(q, k, v, shape, batch).unflatten(1, (q.shape[2], -1))
        return out[:, self.heads].flatten(1)


def row_variants(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Return the mistakes of context ranks in what a row is, the most likely first."""
    if plan.mesh.cp == 1:
        return
    places = context_places(plan.placement)
    yield from _positions(plan, oracle, places)
    yield from _tokens(plan, oracle, places)
    if plan.model.dropout:
        yield from _dropout(plan, oracle, places)
    yield from _heads(plan, oracle)


def _others(places: ContextPlaces) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other positions that a row may be taken for."""
    kind, length = places.placement.kind, places.placement.length
    if not torch.equal(places.contiguous_T, torch.arange(length)):
        yield f"those of contiguous chunks, not of {kind} placement", places.contiguous_T
    yield "counted anew on each context rank", places.local_T
    yield "those of the next context rank", places.moved_ranks(1)
    yield "those of the context rank before", places.moved_ranks(-1)
    if places.placement.ring_degree > 1 != places.placement.ulysses_degree:
        yield "those of the next place of the ring", places.moved(1)


def _positions(plan: Plan, oracle: OracleStep, places: ContextPlaces) -> Iterator[Variant]:
    rope = plan.model.positions == "rope"
    for whose, index_T in _others(places):
        yield _variant(
            plan,
            oracle,
            "layers.0.attention.q.weight" if rope else "positions.weight",
            Finding(factor="positions", says=f"positions are {whose}", axis="cp"),
            lambda index_T=index_T: Positions(lambda index: index_T[index]),
        )


def _tokens(plan: Plan, oracle: OracleStep, places: ContextPlaces) -> Iterator[Variant]:
    for whose, index_T in _others(places):
        if len(index_T.unique()) < len(index_T):
            continue
        for what, tokens_T, labels_T in (
            ("labels", None, index_T.argsort()),
            ("tokens", index_T, None),
            ("tokens and labels", index_T, index_T.argsort()),
        ):
            yield _variant(
                plan,
                oracle,
                "embedding.weight" if tokens_T is not None else "loss",
                Finding(factor=what, says=f"{what} are {whose}", axis="cp"),
                lambda tokens_T=tokens_T, labels_T=labels_T: MovedRows(tokens_T, labels_T),
            )


def _dropout(plan: Plan, oracle: OracleStep, places: ContextPlaces) -> Iterator[Variant]:
    for whose, index_T in _others(places):
        yield _variant(
            plan,
            oracle,
            "embedding.weight",
            Finding(factor="dropout", says=f"the positions of dropout are {whose}", axis="cp"),
            lambda index_T=index_T: MovedDropout(index_T),
        )


def _heads(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Mix up the heads that the members of a Ulysses group exchange."""
    u, tp = plan.layout.context.ulysses_degree, plan.mesh.tp
    if u == 1:
        return
    own = plan.model.heads // tp
    few = own // u
    orders: tuple[tuple[str, Callable[[int], int]], ...] = (
        ("interleaved: rank by rank for each head of a rank", lambda h: h % u * few + h // u),
        ("interleaved: head by head of a rank for each rank", lambda h: h % few * u + h // few),
        ("those of the next member of the Ulysses group", lambda h: (h + few) % own),
        ("those of the member before in the Ulysses group", lambda h: (h - few) % own),
    )
    for how, order in orders:
        heads = [start + order(h) for start in range(0, plan.model.heads, own) for h in range(own)]
        yield _variant(
            plan,
            oracle,
            "layers.0.attention.o.weight",
            Finding(factor="heads permuted", says=f"heads come back {how}", axis="cp"),
            lambda heads=heads: MovedHeads(heads),
        )
    member = {head: m for m in range(u) for head in heads_of_member(plan, m)}
    repeats = plan.model.heads // plan.model.kv_heads
    kv_differ = plan.model.kv_heads > tp
    for shift, whose in ((1, "next member"), (-1, "member before")) if kv_differ else ():

        def choose(head: int, _repeats: int, _kv: int, shift: int = shift) -> int:
            base = head - member[head] * few
            return (base + (member[head] + shift) % u * few) // repeats

        yield _variant(
            plan,
            oracle,
            "layers.0.attention.k.weight",
            Finding(
                factor="wrong heads",
                says=f"query heads meet the key/value heads of the {whose} of the Ulysses group",
                axis="cp",
            ),
            lambda choose=choose: KeyValueHeads(choose),
        )


def _variant(
    plan: Plan,
    oracle: OracleStep,
    tensor: str,
    finding: Finding,
    operations: Callable[[], Operations],
) -> Variant:
    return Variant(
        tensor=tensor,
        finding=finding,
        build=lambda: build_decoder(plan, oracle.before, operations(), routing=oracle.routing),
    )


def _rows(index_T: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return the rows of tokens (t, b), sequence first, of the positions `index_T`."""
    return (index_T[:, None] * num_sequences + torch.arange(num_sequences)).reshape(-1)
