"""Plans timed event by event: what steps of fewer microbatches say of a whole one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from echelon.cost.seconds.balance import balanced_cuts
from echelon.cost.seconds.events import (
    COMPUTED,
    SENT,
    PipelineOrder,
    balanced_stages,
    mean_busy_s,
    simulated_step_s,
    simulated_terms,
)
from echelon.cost.seconds.unit_times import UnitTimes, durations_from_stages
from echelon.schedule.build import build_schedule
from echelon.schedule.flat_schedule import build_flat_schedule

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
