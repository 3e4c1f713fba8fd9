# SPDX-License-Identifier: Apache-2.0
"""Rows of a split sequence that are taken for others, on one device: positions, labels, heads.

A context rank holds some positions; what is made from a position (its rotation, its vector, its
label, what dropout drops) must follow the placement, and heads that were exchanged for positions
must come back in their order.

Shape suffixes: T positions; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from echelon.core.plan import Plan
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.diagnose.token_ranks import ContextPositions, context_positions, heads_of_member
from echelon.proof.mistakes.attention import moved_heads, remapped_heads
from echelon.proof.mistakes.forward import RemappedRows, Variant, positions_tensor


def row_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes of context ranks in what a row is, the most likely first."""
    if plan.mesh.cp == 1:
        return
    others = list(_others(context_positions(plan.placement)))
    tensor = positions_tensor(plan.model)
    for whose, index_T in others:
        finding = ProofFinding("positions", f"positions are {whose}", "cp", tensor=tensor)
        yield Variant(finding, RemappedRows(positions=index_T.__getitem__))
    for whose, index_T in others:
        if len(index_T.unique()) == len(index_T):
            yield from _tokens(whose, index_T)
    for whose, index_T in others if plan.model.dropout else ():
        says = f"the positions of dropout are {whose}"
        finding = ProofFinding("dropout", says, "cp", tensor="embedding.weight")
        yield Variant(finding, RemappedRows(dropout_T=index_T))
    if plan.layout.context.ulysses_degree > 1:
        yield from _heads(plan)


def _others(places: ContextPositions) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other positions that a row may be taken for."""
    kind, length = places.placement.kind, places.placement.length
    if not torch.equal(places.contiguous_T, torch.arange(length)):
        yield f"those of contiguous chunks, not of {kind} placement", places.contiguous_T
    yield "counted anew on each context rank", places.local_T
    yield "those of the next context rank", places.moved_ranks(1)
    yield "those of the context rank before", places.moved_ranks(-1)
    if places.placement.ring_degree > 1 != places.placement.ulysses_degree:
        yield "those of the next place of the ring", places.moved(1)


def _tokens(whose: str, index_T: torch.Tensor) -> Iterator[Variant]:
    for what, tensor, tokens_T, labels_T in (
        ("labels", "loss", None, index_T.argsort()),
        ("tokens", "embedding.weight", index_T, None),
        ("tokens and labels", "embedding.weight", index_T, index_T.argsort()),
    ):
        finding = ProofFinding(what, f"{what} are {whose}", "cp", tensor=tensor)
        yield Variant(finding, RemappedRows(tokens_T=tokens_T, labels_T=labels_T))


def _heads(plan: Plan) -> Iterator[Variant]:
    """Mix up the heads that the members of a Ulysses group exchange."""
    u, tp = plan.layout.context.ulysses_degree, plan.mesh.tp
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
        tensor = "layers.0.attention.o.weight"
        finding = ProofFinding("heads permuted", f"heads come back {how}", "cp", tensor=tensor)
        yield Variant(finding, moved_heads(heads))
    member = {head: m for m in range(u) for head in heads_of_member(plan, m)}
    repeats = plan.model.heads // plan.model.kv_heads
    kv_differ = plan.model.kv_heads > tp
    for shift, whose in ((1, "next member"), (-1, "member before")) if kv_differ else ():

        def choose(head: int, _repeats: int, _kv: int, shift: int = shift) -> int:
            base = head - member[head] * few
            return (base + (member[head] + shift) % u * few) // repeats

        says = f"query heads meet the key/value heads of the {whose} of the Ulysses group"
        finding = ProofFinding("wrong heads", says, "cp", tensor="layers.0.attention.k.weight")
        yield Variant(finding, remapped_heads(choose))
