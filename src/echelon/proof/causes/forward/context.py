# SPDX-License-Identifier: Apache-2.0
"""Attention, mostly over a split sequence, done wrong on one device: in all ways that are known.

A mistake is told by how often each query meets each key (once where right; never, or twice), by how
the softmax over several blocks of keys is put together, or by which position or head a row is taken
for. Where it strikes, its *scope*, is tried from everything down to one chunk of queries and one of
keys. What is made from a position (its rotation, its vector, its label, what dropout drops) must
follow the placement, and heads that were exchanged for positions must come back in their order.

Shape suffixes: T queries, S keys, B sequences, H heads; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from echelon.core.attention_mask import AttentionMask
from echelon.core.plan import Plan
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.attention import (
    NEEDS_THREE,
    WRONG_MERGES,
    BlockNumbers,
    CountPairs,
    counted_attention,
    merged_attention,
    moved_heads,
    remapped_heads,
    ring_steps,
    seen_by,
)
from echelon.proof.causes.forward.row_pieces import called_tiles
from echelon.proof.causes.forward.variants import RemappedRows, Variant, positions_tensor
from echelon.proof.causes.token_ranks import ContextPositions, context_positions, heads_of_member

_ATTENTION = "layers.0.attention"


@dataclass(frozen=True, slots=True)
class MistakeScope:
    """Say where a mistake strikes: pairs of positions, and heads (None: all)."""

    description: str
    pairs_TS: torch.Tensor
    heads: tuple[int, ...] | None = None


def context_variants(plan: Plan) -> Iterator[Variant]:
    """Return the mistakes of attention, over a split sequence or not, the most likely first."""
    axis = "cp" if plan.mesh.cp > 1 else ""
    places = context_positions(plan.placement)
    yield from _merges(plan, places)
    tried: set[tuple[bytes, tuple[int, ...] | None]] = set()
    mistakes = list(_mistakes(plan, places))
    for scope, (factor, says, wrong) in product(scopes(plan, places), mistakes):
        counted = _inside(scope, wrong)
        if _is_new(plan, scope, counted, tried):
            where = f"{says} {scope.description}".strip()
            finding = ProofFinding(factor, where, axis, tensor=_ATTENTION)
            yield Variant(finding, counted_attention(counted, scope.heads))


def _merges(plan: Plan, places: ContextPositions) -> Iterator[Variant]:
    steps_TS, is_ring = ring_steps(places), places.placement.ring_degree > 1
    ways: tuple[tuple[str, BlockNumbers], ...] = (
        *((("blocks", lambda batch: steps_TS),) if is_ring else ()),
        ("pieces", lambda batch: _tile_numbers(plan, batch)),
    )
    if not is_ring and plan.model.window is None:
        return
    for (what, numbers), (how, merge) in product(ways, WRONG_MERGES.items()):
        if places.placement.ring_degree == 2 and (what, how) == ("blocks", NEEDS_THREE):
            continue
        says = f"the outputs of {what} of keys are {how}: not rescaled by their log-sum-exps"
        finding = ProofFinding("merge", says, "cp" * is_ring, tensor=_ATTENTION)
        yield Variant(finding, merged_attention(numbers, merge))


def _tile_numbers(plan: Plan, batch: TokenBatch) -> torch.Tensor:
    """Return in which call of a kernel a query meets a key on its rank, [B, T, S]."""
    length = plan.mathematics.sequence_length
    numbers_BTS = torch.zeros(batch.num_sequences, length, length, dtype=torch.int64)
    for tile in called_tiles(plan, batch):
        at = torch.meshgrid(tile.rows, tile.columns, indexing="ij")
        seen_TS = tile.seen_TS
        numbers_BTS[tile.sequences, at[0][seen_TS], at[1][seen_TS]] = tile.number
    return numbers_BTS


def _mistakes(plan: Plan, places: ContextPositions) -> Iterator[tuple[str, str, CountPairs]]:
    """Yield what can be wrong with how often pairs meet: factor, in words, the wrong count."""
    mask, length = plan.model.mask, places.placement.length
    yield "never met", "attention is left out", lambda seen, batch: 0 * seen
    yield "met twice", "attention is done twice", lambda seen, batch: 2 * seen
    if plan.mathematics.documents == "separate":
        yield "documents", "attention crosses documents", _masked(mask, across=True)
        for by, how in ((1, "late"), (-1, "early")):
            says = f"documents start one position too {how}"
            yield "documents off by one", says, _masked(mask, documents_by=by)
    for by, how in ((1, "one key too late"), (-1, "one key too early")):
        # As though each key stood one row of its run further on.
        keys_S = torch.arange(length) + by * places.step_T
        counted = _masked(mask, keys_S=keys_S, also_TS=(keys_S >= 0)[None, :])
        yield "mask off by one", f"the mask is off by one ({how})", counted
    if mask.window is None:
        return
    for by, how in ((1, "longer"), (-1, "shorter")):
        if mask.window + by:
            counted = _masked(replace(mask, window=mask.window + by))
            yield "mask off by one", f"the window is {how} by one", counted
    unlimited = replace(mask, window=None)
    yield "window", "the window is ignored", _masked(unlimited)
    for what, index_T in (("rank", places.row_T), ("chunk", places.index_T)):
        near_TS = (index_T[:, None] - index_T[None, :]).abs() < mask.window
        says = f"the window is counted in rows of a {what}, not in positions"
        yield "window", says, _masked(unlimited, also_TS=near_TS)


def _masked(
    mask: AttentionMask,
    *,
    across: bool = False,
    documents_by: int = 0,
    keys_S: torch.Tensor | None = None,
    also_TS: torch.Tensor | None = None,
) -> CountPairs:
    """Count by another mask, across documents or moved ones, or with keys at other positions."""

    def counted(_: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        positions_T = batch.positions_T
        keys = positions_T if keys_S is None else keys_S
        documents = batch.documents and tuple(
            (0, *(max(0, start + documents_by) for start in starts[1:]))
            for starts in batch.documents
        )
        other = visible(positions_T, keys, mask, None if across else documents)
        return other if also_TS is None else other & also_TS

    return counted


def _inside(scope: MistakeScope, wrong: CountPairs) -> CountPairs:
    """Count wrong where the scope is."""
    return lambda seen, batch: torch.where(scope.pairs_TS, wrong(seen, batch), seen)


def scopes(plan: Plan, places: ContextPositions) -> Iterator[MistakeScope]:
    """Yield where a mistake may strike; then the same for the heads of one rank."""
    found = list(_pairs(plan, places))
    yield from found
    ulysses = plan.layout.context.ulysses_degree
    for member in range(ulysses if ulysses > 1 else 0):
        heads = tuple(heads_of_member(plan, member))
        of = f"for the heads of member {member} of a Ulysses group"
        yield from (
            MistakeScope(f"{one.description} {of}".strip(), one.pairs_TS, heads) for one in found
        )


def _pairs(plan: Plan, places: ContextPositions) -> Iterator[MistakeScope]:
    place_T, n = places.ring_rank_T, places.placement.ring_degree
    yield MistakeScope("", torch.ones(len(place_T), len(place_T), dtype=torch.bool))
    if n == 1:
        return
    steps_TS = ring_steps(places)
    says = "for the keys of later ranks, as though chunks were contiguous"
    yield MistakeScope(says, place_T[None, :] > place_T[:, None])
    yield MistakeScope("for the keys of other context ranks", steps_TS > 0)
    for place, owner in product(range(n), repeat=2):
        says = f"where place {place} of the ring meets the keys of place {owner}"
        yield MistakeScope(says, (place_T == place)[:, None] & (place_T == owner)[None, :])
    for step in range(n):
        yield MistakeScope(f"at step {step} of the ring", steps_TS == step)
    for place in range(n):
        says, mine_TS = f"on place {place} of the ring", (place_T == place)[:, None]
        yield MistakeScope(says, mine_TS.expand_as(steps_TS))
        yield MistakeScope(f"{says}, for the keys of others", mine_TS & (steps_TS > 0))
    run_T = places.run_T
    for mine, other in product(range(int(run_T.max()) + 1), repeat=2):
        says = f"where chunk {mine} (rank by rank) meets the keys of chunk {other}"
        yield MistakeScope(says, (run_T == mine)[:, None] & (run_T == other)[None, :])


def _is_new(
    plan: Plan,
    scope: MistakeScope,
    counted: CountPairs,
    tried: set[tuple[bytes, tuple[int, ...] | None]],
) -> bool:
    """Return whether a mistake changes something, and otherwise than those that were tried."""
    length = plan.mathematics.sequence_length
    documents = ((0, length // 3),) if plan.mathematics.documents == "separate" else None
    tokens_BT = torch.zeros(1, length, dtype=torch.int64)
    whole = TokenBatch.from_rows(tokens_BT, tokens_BT, torch.zeros(1, dtype=torch.int64))
    batch = whole.cut((), documents)
    seen = seen_by(plan.model, batch).to(torch.int64)
    times = counted(seen.bool(), batch).to(torch.int64)
    # A row that meets everything twice meets everything once, as a softmax sees it.
    times = times // times.where(times > 0, 9).amin(-1, keepdim=True).clamp(max=2)
    key = times.numpy().tobytes(), scope.heads
    if torch.equal(times, seen) or key in tried:
        return False
    tried.add(key)
    return True


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
