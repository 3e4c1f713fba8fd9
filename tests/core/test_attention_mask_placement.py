"""Every position of a sequence is on one context rank, and causal work is the same on each."""

from __future__ import annotations

import pytest

from echelon.core.attention_mask import AttentionMask, Placement, PlacementKind

KINDS: tuple[PlacementKind, ...] = ("contiguous", "zigzag", "striped")


def placement(kind: PlacementKind, ring: int, ulysses: int, length: int) -> Placement:
    return Placement(kind=kind, ring_degree=ring, ulysses_degree=ulysses, length=length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 4)])
def test_each_position_is_on_one_rank(kind: PlacementKind, ring: int, ulysses: int) -> None:
    where = placement(kind, ring, ulysses, 48)
    held = [where.positions(rank) for rank in range(where.degree)]
    assert {len(one) for one in held} == {48 // where.degree}
    assert sorted(p for one in held for p in one) == list(range(48))


@pytest.mark.parametrize("kind", KINDS)
def test_a_ulysses_group_holds_its_part_of_the_ring_in_order(kind: PlacementKind) -> None:
    where = placement(kind, 2, 2, 16)
    for place in range(2):
        whole = [run.position(i) for run in where.ring_runs(place) for i in range(run.count)]
        assert where.positions(2 * place) + where.positions(2 * place + 1) == whole


def work(where: Placement, rank: int, mask: AttentionMask) -> int:
    runs = where.runs(rank)
    return sum(
        mask.band(queries, keys).num_pairs(queries.count, keys.count)
        for queries in runs
        for other in range(where.degree)
        for keys in where.runs(other)
    )


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_causal_work_is_balanced(degree: int) -> None:
    length, mask = 3 * 2048, AttentionMask()
    for kind in KINDS:
        done = [work(placement(kind, degree, 1, length), r, mask) for r in range(degree)]
        assert sum(done) == mask.num_pairs(length)
        spread = (max(done) - min(done)) / max(done)
        if kind == "zigzag":
            assert spread == 0
        elif kind == "striped":
            assert 0 < spread < 0.01
        else:
            assert spread > 0.6
