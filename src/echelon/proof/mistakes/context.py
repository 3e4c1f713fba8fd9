# SPDX-License-Identifier: Apache-2.0
"""Attention, mostly over a split sequence, done wrong on one device: in all ways that are known.

A mistake is told by how often each query meets each key (once where right; never, or twice), by how
the softmax over several blocks of keys is put together, or by which position or head a row is taken
for. Where it strikes, its *scope*, is tried from everything down to one chunk of queries and one of
keys.

Shape suffixes: T queries, S keys, B sequences, H heads; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from echelon.core.attention_mask import AttentionMask
from echelon.core.plan import Plan
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.diagnose.token_ranks import ContextPositions, context_positions, heads_of_member
from echelon.proof.mistakes.attention import (
    NEEDS_THREE,
    WRONG_MERGES,
    BlockNumbers,
    CountPairs,
    counted_attention,
    merged_attention,
    ring_steps,
    seen_by,
)
from echelon.proof.mistakes.forward import Variant
from echelon.proof.mistakes.row_pieces import called_tiles

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
