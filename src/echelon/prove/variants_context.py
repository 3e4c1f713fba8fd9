"""Attention over a split sequence, done wrong on one device: in all the ways that are known.

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

from echelon.core.attention_mask import AttentionMask, Run
from echelon.core.plan import Plan
from echelon.models.attention.interface import band_visible
from echelon.models.attention.pieces import pieces_between
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch, positions_of
from echelon.prove.context_places import ContextPlaces, context_places, heads_of_member
from echelon.prove.diagnosis import Finding
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.variants import Variant
from echelon.prove.wrong_attention import (
    NEEDS_THREE,
    WRONG_MERGES,
    BlockNumbers,
    Counted,
    CountedAttention,
    MergedAttention,
    ring_steps,
    seen_by,
)


@dataclass(frozen=True, slots=True)
class Scope:
    """Say where a mistake strikes: pairs of positions, and heads (None: all)."""

    says: str
    pairs_TS: torch.Tensor
    heads: tuple[int, ...] | None = None


def context_variants(plan: Plan, oracle: OracleStep) -> Iterator[Variant]:
    """Return the mistakes of attention over a split sequence, the most likely first."""
    if plan.mesh.cp == 1:
        return
    places = context_places(plan.placement)
    yield from _merges(plan, oracle, places)
    tried: set[tuple[bytes, tuple[int, ...] | None]] = set()
    for scope, factor, says, counted in _counts(plan, places):
        if _is_new(plan, scope, counted, tried):
            yield attention_variant(
                plan, oracle, factor, f"{says} {scope.says}".strip(), counted, scope.heads
            )


def attention_variant(
    plan: Plan,
    oracle: OracleStep,
    factor: str,
    says: str,
    counted: Counted,
    heads: tuple[int, ...] | None,
) -> Variant:
    """Return the variant in which queries meet keys as `counted` says."""
    return Variant(
        tensor="layers.0.attention",
        finding=Finding(factor=factor, says=says, axis="cp"),
        build=lambda: build_decoder(
            plan, oracle.before, CountedAttention(counted, heads), routing=oracle.routing
        ),
    )


def _merges(plan: Plan, oracle: OracleStep, places: ContextPlaces) -> Iterator[Variant]:
    if places.placement.ring_degree == 1:
        return
    steps_TS = ring_steps(places)
    ways: tuple[tuple[str, BlockNumbers], ...] = (
        ("blocks", lambda batch: steps_TS),
        ("pieces", lambda batch: piece_numbers(plan, batch)),
    )
    for (what, numbers), (how, merge) in product(ways, WRONG_MERGES.items()):
        if places.placement.ring_degree == 2 and (what, how) == ("blocks", NEEDS_THREE):
            continue
        says = f"the outputs of {what} of keys are {how}: not rescaled by their log-sum-exps"
        yield Variant(
            tensor="layers.0.attention",
            finding=Finding(factor="merge", says=says, axis="cp"),
            build=lambda numbers=numbers, merge=merge: build_decoder(
                plan, oracle.before, MergedAttention(numbers, merge), routing=oracle.routing
            ),
        )


def piece_numbers(plan: Plan, batch: TokenBatch) -> torch.Tensor:
    """Return in which call of a kernel a query meets a key on its rank, [B, T, S]."""
    placement, mask = plan.placement, plan.model.mask
    n, whole = placement.ring_degree, (Run(0, 1, placement.length),)
    numbers_BTS = torch.zeros(
        batch.num_sequences, placement.length, placement.length, dtype=torch.int64
    )
    for place in range(n):
        queries, number = placement.ring_runs(place), 0
        blocks = [placement.ring_runs((place + step) % n) for step in range(n)]
        for keys in (whole,) if plan.layout.context.kind == "gathered" else blocks:
            for piece in pieces_between(queries, keys, mask, batch.documents):
                rows = positions_of(queries, numbers_BTS.device)[piece.q]
                columns = positions_of(keys, numbers_BTS.device)[piece.k]
                seen = band_visible(piece.band, len(rows), len(columns), rows.device)
                at = torch.meshgrid(rows, columns, indexing="ij")
                numbers_BTS[piece.sequences, at[0][seen], at[1][seen]] = number
                number += 1
    return numbers_BTS


Mistake = tuple[Scope, str, str, Counted]


def _counts(plan: Plan, places: ContextPlaces) -> Iterator[Mistake]:
    """Yield each mistake in how often pairs meet: scope, factor, what it is, the count."""
    mask = plan.model.mask
    for scope in scopes(plan, places):
        yield scope, "never met", "attention is left out", _times(scope, 0)
        yield scope, "met twice", "attention is done twice", _times(scope, 2)
        if plan.mathematics.documents == "separate":
            yield scope, "documents", "attention crosses documents", _crossing(scope, mask)
        for by, how in ((1, "one key too late"), (-1, "one key too early")):
            says = f"the mask is off by one ({how})"
            yield scope, "mask off by one", says, _shifted(scope, places, mask, by)
        if mask.window is not None:
            yield from _window_counts(scope, places, mask)


def _window_counts(scope: Scope, places: ContextPlaces, mask: AttentionMask) -> Iterator[Mistake]:
    assert mask.window is not None
    for by, how in ((1, "longer"), (-1, "shorter")):
        other = replace(mask, window=mask.window + by)
        if other.window:
            says = f"the window is {how} by one"
            yield scope, "mask off by one", says, _masked(scope, other)
    unlimited = replace(mask, window=None)
    yield scope, "window", "the window is ignored", _masked(scope, unlimited)
    for what, index_T in (("rank", places.row_T), ("chunk", places.index_T)):
        near_TS = (index_T[:, None] - index_T[None, :]).abs() < mask.window
        says = f"the window is counted in rows of a {what}, not in positions"
        yield scope, "window", says, _masked(scope, unlimited, near_TS)


def scopes(plan: Plan, places: ContextPlaces) -> Iterator[Scope]:
    """Yield where a mistake may strike; then the same for the heads of one rank."""
    found = list(_pairs(plan, places))
    yield from found
    ulysses = plan.layout.context.ulysses_degree
    for member in range(ulysses if ulysses > 1 else 0):
        heads = tuple(heads_of_member(plan, member))
        of = f"for the heads of member {member} of a Ulysses group"
        yield from (Scope(f"{one.says} {of}".strip(), one.pairs_TS, heads) for one in found)


def _pairs(plan: Plan, places: ContextPlaces) -> Iterator[Scope]:
    place_T, n = places.place_T, places.placement.ring_degree
    yield Scope("", torch.ones(len(place_T), len(place_T), dtype=torch.bool))
    if n == 1:
        return
    steps_TS = ring_steps(places)
    ahead_TS = place_T[None, :] - place_T[:, None]
    yield Scope("for the keys of later ranks, as though chunks were contiguous", ahead_TS > 0)
    yield Scope("for the keys of other context ranks", steps_TS > 0)
    for place in range(n):
        for owner in range(n):
            says = f"where place {place} of the ring meets the keys of place {owner}"
            yield Scope(says, (place_T == place)[:, None] & (place_T == owner)[None, :])
    for step in range(n):
        yield Scope(f"at step {step} of the ring", steps_TS == step)
    for place in range(n):
        mine_TS = (place_T == place)[:, None].expand_as(steps_TS)
        yield Scope(f"on place {place} of the ring", mine_TS)
        yield Scope(
            f"on place {place} of the ring, for the keys of others", mine_TS & (steps_TS > 0)
        )
    run_T = places.run_T
    for mine in range(int(run_T.max()) + 1):
        for other in range(int(run_T.max()) + 1):
            says = f"where chunk {mine} (rank by rank) meets the keys of chunk {other}"
            yield Scope(says, (run_T == mine)[:, None] & (run_T == other)[None, :])


def _is_new(
    plan: Plan,
    scope: Scope,
    counted: Counted,
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


def _times(scope: Scope, number: int) -> Counted:
    return lambda seen, batch: torch.where(scope.pairs_TS, number, 1) * seen


def _masked(scope: Scope, mask: AttentionMask, also_TS: torch.Tensor | None = None) -> Counted:
    """Count by another mask where the scope is."""

    def counted(seen: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        positions_T = batch.positions_T
        other = visible(positions_T, positions_T, mask, batch.documents)
        other = other if also_TS is None else other & also_TS
        return torch.where(scope.pairs_TS, other, seen)

    return counted


def _crossing(scope: Scope, mask: AttentionMask) -> Counted:
    """Count as though all were one document where the scope is."""

    def counted(seen: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        positions_T = batch.positions_T
        return torch.where(scope.pairs_TS, visible(positions_T, positions_T, mask, None), seen)

    return counted


def _shifted(scope: Scope, places: ContextPlaces, mask: AttentionMask, by: int) -> Counted:
    """Count as though each key stood `by` rows of its run further on."""

    def counted(seen: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        positions_T = torch.arange(places.placement.length)
        keys_S = positions_T + by * places.step_T
        moved = visible(positions_T, keys_S, mask, batch.documents) & (keys_S >= 0)
        return torch.where(scope.pairs_TS, moved, seen)

    return counted
