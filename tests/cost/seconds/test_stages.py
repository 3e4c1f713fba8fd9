"""Cuts of a model into stages: the slowest rank as fast as it can be, and what that is worth."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations_with_replacement
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cost.seconds.stages import (
    COMPUTED,
    SENT,
    PipelineOrder,
    Stages,
    balance,
    balanced_cuts,
    balanced_stages,
    imbalance,
    mean_busy_s,
    rank_seconds,
    simulated_step_s,
    simulated_terms,
    split_layers,
)
from echelon.cost.seconds.unit_times import UnitTimes, durations_from_stages, stage_seconds
from echelon.schedule.build import build_schedule
from echelon.schedule.timer import build_flat_schedule
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


LAYERS = 21
ORDERS = (
    ("1f1b", 4, 1, 100),
    ("1f1b", 5, 1, 133),
    ("interleaved-1f1b", 4, 3, 101),
    ("zb-h1", 4, 1, 102),
    ("zb-h2", 3, 1, 100),
    ("zb-v", 4, 2, 120),
    ("dualpipe-v", 4, 2, 121),
    ("dualpipe", 4, 1, 120),
    ("gpipe", 4, 1, 90),
)


def of_order(name: str, pp: int, virtual: int, microbatches: int) -> PipelineOrder:
    """Return the order of a pipeline."""
    return PipelineOrder(
        schedule=name, num_ranks=pp, num_stages=pp * virtual, num_microbatches=microbatches
    )


def uneven_times(seed: int) -> UnitTimes:
    """Return seconds of units that are all different, with a head that is worth several."""
    random = Random(seed)
    units = ("embedding", *(f"layers.{layer}" for layer in range(LAYERS)), "head")
    forward, inputs, weights = (
        {unit: random.uniform(0.9, 1.1) * (3.0 if unit == "head" else 1.0) for unit in units}
        for _ in range(3)
    )
    return UnitTimes(
        source="modelled", forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights
    )


@pytest.mark.parametrize("numbers", ORDERS)
def test_a_step_of_many_microbatches_is_timed_by_a_few_of_them(
    numbers: tuple[str, int, int, int],
) -> None:
    name, pp, virtual, microbatches = numbers
    order = of_order(*numbers)
    for seed in range(2):
        times = uneven_times(seed)
        stages = balanced_stages(order, times, LAYERS)
        whole = build_flat_schedule(name, pp * virtual, pp, microbatches)
        exact = whole.makespan_s(durations_from_stages(stages, times))
        assert simulated_step_s(order, times, stages) == pytest.approx(exact, rel=1e-9)
    assert order.num_actions < 3 * pp * virtual * microbatches


def test_of_two_cuts_the_faster_step_is_taken() -> None:
    order, times = of_order("interleaved-1f1b", 4, 2, 8), uneven_times(1)
    cuts = balanced_cuts(times, LAYERS, order.held)
    steps = [simulated_step_s(order, times, stages) for stages in cuts]
    assert simulated_step_s(order, times, balanced_stages(order, times, LAYERS)) == min(steps)


def test_a_schedule_of_rows_is_timed_as_it_is() -> None:
    times, order = uneven_times(0), of_order("zb-h1", 4, 1, 12)
    stages = balanced_stages(order, times, LAYERS)
    built = build_schedule("zb-h1", num_stages=4, num_ranks=4, num_microbatches=12)
    listed = replace(order, schedule="file", listed=built)
    assert listed.held == order.held
    assert simulated_step_s(listed, times, stages) == simulated_step_s(order, times, stages)


def test_terms_add_up_to_what_events_say() -> None:
    order, times = of_order("1f1b", 4, 1, 8), uneven_times(0)
    stages = balanced_stages(order, times, LAYERS)
    seconds, busy = simulated_step_s(order, times, stages), mean_busy_s(order, times)
    closed: dict[str, float] = dict.fromkeys((*COMPUTED, "bubble", "optimizer"), 1.0)
    terms = simulated_terms(closed, order, times, stages)
    assert sum(terms.values()) == pytest.approx(seconds + 1.0)
    assert terms["bubble"] == pytest.approx(seconds - busy)
    measured = simulated_terms(closed, order, replace(times, source="measured"), stages)
    assert all(measured[name] == 1.0 for name in SENT)
    assert sum(measured.values()) == pytest.approx(seconds + 1.0 + len(SENT))


def test_ranks_that_wait_leave_their_cores_to_others() -> None:
    order, times = of_order("1f1b", 4, 1, 8), uneven_times(0)
    stages = balanced_stages(order, times, LAYERS)
    seconds, busy = simulated_step_s(order, times, stages), mean_busy_s(order, times)
    closed: dict[str, float] = dict.fromkeys((*COMPUTED, "bubble"), 1.0)
    few = simulated_terms(closed, order, times, stages, share=0.25)
    assert sum(few.values()) == pytest.approx(busy)
    some = simulated_terms(closed, order, times, stages, share=0.99)
    assert sum(some.values()) == pytest.approx(0.99 * seconds)
