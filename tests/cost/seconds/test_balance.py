"""Cuts of a model into stages: the slowest rank as fast as it can be, and what that is worth."""

from __future__ import annotations

from itertools import chain, combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cost.seconds.balance import (
    Stages,
    balance,
    balanced_cuts,
    imbalance,
    rank_seconds,
    split_layers,
)
from echelon.cost.seconds.unit_times import UnitTimes, stage_seconds
from tests.walks import examples, shortened

Held = tuple[tuple[int, ...], ...]


def times_of(blocks: list[float], embedding: float = 0.0, head: float = 0.0) -> UnitTimes:
    """Return times whose F, B and W are a third each."""
    units = {"embedding": embedding, "head": head}
    units |= {f"layers.{layer}": seconds for layer, seconds in enumerate(blocks)}
    third = {unit: seconds / 3 for unit, seconds in units.items()}
    return UnitTimes(
        source="modelled", forward_s=third, input_gradient_s=third, weight_gradient_s=third
    )


def one_each(pp: int) -> Held:
    return tuple((rank,) for rank in range(pp))


def in_turn(pp: int, virtual: int) -> Held:
    return tuple(tuple(range(rank, pp * virtual, pp)) for rank in range(pp))


def as_a_v(pp: int) -> Held:
    return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))


def both_ways(pp: int) -> Held:
    return tuple(tuple(sorted((rank, pp - 1 - rank))) for rank in range(pp))


def every_cut(layers: int, stages: int) -> list[Stages]:
    """Return all ways to cut blocks into stages in order, empty ones included."""
    found: list[Stages] = []
    for cuts in combinations_with_replacement(range(layers + 1), stages - 1):
        ends = (0, *cuts, layers)
        found.append(tuple(tuple(range(ends[s], ends[s + 1])) for s in range(stages)))
    return found


def slowest(stages: Stages, held: Held, times: UnitTimes) -> float:
    return max(rank_seconds(stages, held, times))


@pytest.mark.system("S17")
@pytest.mark.parametrize("pp", shortened(range(1, 6), lambda pp: pp < 5))
@settings(max_examples=examples(20), deadline=None)
@given(
    blocks=st.lists(st.floats(0.1, 10), min_size=12, max_size=12),
    embedding=st.floats(0, 5),
    head=st.floats(0, 30),
)
def test_one_stage_on_a_rank_is_the_best_of_all_cuts(
    pp: int, blocks: list[float], embedding: float, head: float
) -> None:
    times, held = times_of(blocks, embedding, head), one_each(pp)
    found = balance(times, 12, held)
    assert list(chain.from_iterable(found)) == list(range(12))
    cuts = every_cut(12, pp)
    best = min(slowest(cut, held, times) for cut in cuts)
    assert slowest(found, held, times) == pytest.approx(best, rel=1e-8)
    # Among the best it is one of the most even in blocks.
    alike = [cut for cut in cuts if slowest(cut, held, times) <= best * (1 + 1e-10)]
    squares = [sum(len(stage) ** 2 for stage in cut) for cut in alike]
    assert sum(len(stage) ** 2 for stage in found) <= min(squares)


HELD = {
    "two in turn": in_turn(3, 2),
    "three in turn": in_turn(2, 3),
    "a V": as_a_v(3),
    "both ways": both_ways(4),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("held", HELD.values(), ids=list(HELD))
@pytest.mark.parametrize("head", [0.0, 0.4, 3.7, 8.0])
def test_several_stages_on_a_rank_are_best_where_blocks_are_alike(held: Held, head: float) -> None:
    times = times_of([1.0] * 12, 0.3, head)
    stages = 1 + max(max(mine) for mine in held)
    found = balance(times, 12, held)
    assert list(chain.from_iterable(found)) == list(range(12))
    assert len(found) == stages
    best = min(slowest(cut, held, times) for cut in every_cut(12, stages))
    assert slowest(found, held, times) == pytest.approx(best)


@settings(max_examples=examples(20), deadline=None)
@given(
    blocks=st.lists(st.floats(0.5, 4), min_size=8, max_size=8),
    head=st.floats(0, 8),
    held=st.sampled_from([in_turn(2, 2), as_a_v(2), both_ways(4)]),
)
def test_unlike_blocks_are_never_worse_than_evenly_cut_by_time(
    blocks: list[float], head: float, held: Held
) -> None:
    times = times_of(blocks, 0.1, head)
    found = balance(times, 8, held)
    assert list(chain.from_iterable(found)) == list(range(8))
    by_stage = balance(times, 8, one_each(len(found)))
    assert slowest(found, held, times) <= slowest(by_stage, held, times) * (1 + 1e-9)
    assert max(stage_seconds(by_stage, times)) <= max(stage_seconds(found, times)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("layers", "head", "counts"),
    [
        (8, 0.0, (2, 2, 2, 2)),
        (32, 3.0, (9, 9, 8, 6)),
        (8, 2.0, (2, 2, 3, 1)),
        (8, 20.0, (2, 3, 3, 0)),
        (9, 0.1, (2, 2, 3, 2)),
    ],
)
def test_a_head_is_worth_the_blocks_that_it_lasts(
    layers: int, head: float, counts: tuple[int, ...]
) -> None:
    times, held = times_of([1.0] * layers, 0.0, head), one_each(4)
    found = balance(times, layers, held)
    before, after = (rank_seconds(one, held, times) for one in (split_layers(layers, 4), found))
    assert max(after) <= max(before)
    assert sum(after) == pytest.approx(sum(before))
    assert imbalance(found, held, times) == pytest.approx(max(after) / ((layers + head) / 4))
    assert sorted(map(len, found)) == sorted(counts)
    assert len(found[-1]) == counts[-1]


def test_a_cut_by_stages_is_offered_beside_one_by_ranks() -> None:
    times = times_of([1.0] * 12, 0.0, 6.0)
    assert balanced_cuts(times, 12, one_each(4)) == (balance(times, 12, one_each(4)),)
    by_rank, by_stage = balanced_cuts(times, 12, in_turn(3, 2))
    assert by_rank == balance(times, 12, in_turn(3, 2))
    assert max(stage_seconds(by_stage, times)) <= max(stage_seconds(by_rank, times))
    assert slowest(by_rank, in_turn(3, 2), times) <= slowest(by_stage, in_turn(3, 2), times)


def test_mirrored_ranks_share_the_work_of_a_stage() -> None:
    times = times_of([1.0] * 4, 0.0, 2.0)
    stages = split_layers(4, 4)
    assert rank_seconds(stages, both_ways(4), times) == pytest.approx((2.0, 1.0, 1.0, 2.0))
    assert imbalance(stages, both_ways(4), times) == pytest.approx(2 / 1.5)


def test_nothing_to_compute_is_balanced() -> None:
    times = times_of([0.0])
    assert imbalance(((0,),), ((0,),), times) == 1.0
