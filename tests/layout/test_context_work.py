"""Work of context ranks, counted pair by pair: nothing missing, nothing twice, and balanced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.attention_mask import AttentionMask, Placement, PlacementKind, PositionRun
from echelon.core.plan import Plan
from echelon.layout.context_work import (
    attention_imbalance,
    chunk_pairs,
    chunk_runs,
    half_work_row,
    pairs_between,
    pairs_by_place,
    scores_by_rank,
)

CAUSAL, FULL = AttentionMask(), AttentionMask(causal=False)
MASKS = [CAUSAL, FULL, AttentionMask(window=7), AttentionMask(causal=False, window=11)]
KINDS: tuple[PlacementKind, ...] = ("contiguous", "zigzag", "striped")
LENGTH = 48


def place_of(kind: PlacementKind, n: int, length: int = LENGTH) -> Placement:
    return Placement(kind=kind, ring_degree=n, ulysses_degree=1, length=length)


def plan_of(kind: str, cp: int, *settings: str) -> Plan:
    sets = (f"mesh.cp={cp}", "mesh.dp_replicate=1", "mesh.pp=1", "batch.sequence_length=8192")
    model = ("model.max_positions=8192", f"context.kind={kind}", "cluster.preset=8xh100")
    return load_job("llama3-8b", (*sets, *model, *settings)).plan


def met(placement: Placement, place: int, mask: AttentionMask, starts: tuple[int, ...]) -> int:
    """Count what the queries of a place meet, one pair after the other."""

    def document(position: int) -> int:
        return sum(start <= position for start in starts)

    queries = [run.position(i) for run in placement.ring_runs(place) for i in range(run.count)]
    return sum(
        mask.allows(query, key) and document(query) == document(key)
        for query in queries
        for key in range(LENGTH)
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_pairs_are_those_counted_one_by_one(
    kind: PlacementKind, n: int, mask: AttentionMask
) -> None:
    placement = place_of(kind, n)
    documents = ((0,), (0, 1, 5, 40), (0, 24))
    for starts in documents:
        wanted = tuple(met(placement, place, mask, starts) for place in range(n))
        assert pairs_by_place(placement, mask, (starts,)) == wanted
    assert sum(pairs_by_place(placement, mask)) == mask.num_pairs(LENGTH)
    together = [pairs_by_place(placement, mask, (starts,)) for starts in documents]
    assert pairs_by_place(placement, mask, documents) == tuple(
        map(sum, zip(*together, strict=True))
    )


@pytest.mark.system("S31")
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_work_is_balanced(cp: int) -> None:
    zigzag, striped = (pairs_by_place(place_of(kind, cp, 8192), CAUSAL) for kind in KINDS[1:])
    assert len({*zigzag}) == 1
    assert max(striped) - min(striped) < 0.01 * max(striped)
    # Place i has i chunks before its own: the first works 1 / (2n - 1) of what the last does.
    contiguous = pairs_by_place(place_of("contiguous", cp, 8192), CAUSAL)
    assert max(contiguous) == pytest.approx((2 * cp - 1) * min(contiguous), rel=2e-3)


@pytest.mark.parametrize("kind", ["ring", "striped", "gathered", "ulysses", "ulysses-ring"])
def test_ranks_share_the_scores_of_a_model(kind: str) -> None:
    plan = plan_of(kind, 4)
    scores = scores_by_rank(plan)
    whole = plan.model.mask.num_pairs(8192) * plan.model.heads * plan.layout.microbatch_sequences
    assert sum(scores) == whole
    assert attention_imbalance(plan) == (max(scores) - min(scores)) / max(scores) < 0.01
    assert (attention_imbalance(plan) > 0) == (kind == "striped")


def test_documents_of_unequal_length_unbalance_a_ring_but_not_ulysses() -> None:
    long_and_short = ((0, 4096, *range(4096, 8192, 64)[1:]),)
    ring, ulysses = plan_of("ring", 4), plan_of("ulysses", 4)
    assert attention_imbalance(ring, long_and_short) > 0.3
    assert attention_imbalance(ulysses, long_and_short) == 0.0
    scores = scores_by_rank(ring, long_and_short)
    pairs = CAUSAL.num_pairs(4096) + 64 * CAUSAL.num_pairs(64)
    assert sum(scores) == pairs * ring.model.heads


@pytest.mark.system("S30")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_visible_block_pair_is_met_exactly_once(
    kind: PlacementKind, n: int, mask: AttentionMask
) -> None:
    placement = place_of(kind, n)
    chunks = chunk_runs(placement)
    for gathered in (False, True):
        found = chunk_pairs(placement, mask, gathered=gathered)
        cells = [(meeting.queries, meeting.keys) for meeting in found]
        visible = {
            (q, k)
            for q, (_, queries) in enumerate(chunks)
            for k, (_, keys) in enumerate(chunks)
            if pairs_between((queries,), (keys,), mask)
        }
        assert len(cells) == len({*cells})
        assert {*cells} == visible
        assert sum(meeting.pairs for meeting in found) == mask.num_pairs(LENGTH)
        assert {meeting.step for meeting in found} <= ({0} if gathered else {*range(n)})
        for meeting in found:
            assert chunks[meeting.queries][0] == meeting.place
            assert chunks[meeting.keys][0] == meeting.owner


def test_without_the_ring_twelve_of_sixteen_block_pairs_are_missing() -> None:
    full = chunk_pairs(place_of("contiguous", 4), FULL, gathered=False)
    assert len(full) == 16
    assert [sum(one.step == step for one in full) for step in range(4)] == [4, 4, 4, 4]
    causal = chunk_pairs(place_of("contiguous", 4), CAUSAL, gathered=False)
    assert {(one.queries, one.keys) for one in causal} == {
        (q, k) for q in range(4) for k in range(q + 1)
    }
    # Zigzag: at each later step a place meets half of a square, at the first its own two halves.
    zigzag = chunk_pairs(place_of("zigzag", 4), CAUSAL, gathered=False)
    assert len(zigzag) == 8 * 9 // 2
    later = [[m.pairs for m in zigzag if (m.place, m.step) == (0, e)] for e in range(1, 4)]
    assert {sum(pairs) for pairs in later} == {(LENGTH // 4) ** 2 // 2}


def test_a_short_window_leaves_far_chunks_unmet() -> None:
    plan = plan_of("ring", 4, "model.window=512")
    found = chunk_pairs(plan.placement, plan.model.mask, gathered=False)
    assert {m.queries - m.keys for m in found} == {0, 1}
    wide = replace(plan.model.mask, window=None)
    assert len(chunk_pairs(plan.placement, wide, gathered=False)) > len(found)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(causal=False), AttentionMask(window=40)], ids=str
)
def test_half_of_the_work_lies_before_the_row_that_is_halfway(
    kind: PlacementKind, mask: AttentionMask
) -> None:
    where = Placement(kind=kind, ring_degree=4, ulysses_degree=1, length=512)
    for place in range(4):
        runs = where.ring_runs(place)
        row, whole = half_work_row(runs, mask), pairs_between(runs, runs, mask)
        first = sum(
            mask.allows(runs_position(runs, i), runs_position(runs, j))
            for i in range(row)
            for j in range(128)
        )
        assert abs(first / whole - 0.5) < 2.5 / 128
    assert half_work_row((PositionRun(3, 1, 1),), mask) == 1
    assert half_work_row((PositionRun(3, 1, 2),), mask) == 1


def runs_position(runs: tuple[PositionRun, ...], row: int) -> int:
    """Return the position at a row of runs, counted one by one."""
    for run in runs:
        if row < run.count:
            return run.position(row)
        row -= run.count
    raise IndexError(row)
