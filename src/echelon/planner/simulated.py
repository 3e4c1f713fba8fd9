"""A plan of a search timed event by event: its schedule, with stages as they are really cut.

Closed forms take all ranks for as slow as the one with most blocks. Here blocks are cut so that the
slowest rank is as fast as it can be, and the actions of the schedule are timed one by one with the
seconds of blocks and ends that the lattice gives; messages keep their closed form.

A step of many microbatches is the same pattern over and over. Where there are more than MOST_TIMES
as many as pipeline ranks, steps of fewer are timed, each a period longer than the one before, until
a period adds what the last one added and no less than its slowest rank computes. No period after it
can add another amount then, and the rest is a multiplication (`tests/planner/test_simulated.py`
compares with whole steps).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from echelon.core.model_shape import ModelShape
from echelon.cost.balance import balance
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.cost.lattice.block import BlockSeconds, Work
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.step import Blocks, blocks_of
from echelon.cost.unit_times import UnitTimes, durations_of
from echelon.planner.choice import Choice
from echelon.planner.lanes import Lanes, lanes_of
from echelon.planner.pins import NO_RECOMPUTE
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES
from echelon.schedule.simulate import Durations

Stages = tuple[tuple[int, ...], ...]

MOST_TIMES = 8
FEW_TIMES = (2, 3, 4)
"""Periods of microbatches that the first shorter steps have."""
SAME = 1e-9
COMPUTED = (
    "products",
    "attention",
    "memory",
    "host",
    "head",
    "recompute",
    "tensor",
    "context",
    "expert",
)
"""Terms of a step that an event of a schedule has in it."""


def num_actions(choice: Choice) -> int:
    """Return how many actions are timed for a plan, where few microbatches are enough."""
    each = 3 * choice.mesh.pp * choice.virtual
    return each * sum(_lengths(choice) or (choice.microbatches,))


def unit_times(choice: Choice, work: Work, model: ModelShape) -> UnitTimes:
    """Return the seconds of each unit of a model for one microbatch, as the lattice gives them."""
    dense = model.experts.first_dense_layers if model.experts else model.layers
    return _unit_times(choice, blocks_of(work), model.layers, dense)


def cut_stages(choice: Choice, times: UnitTimes, layers: int) -> Stages:
    """Return the blocks of each stage, cut so that the slowest rank is as fast as it can be."""
    pp = choice.mesh.pp
    owners = SCHEDULES[choice.schedule](
        num_stages=pp * choice.virtual, num_ranks=pp, num_microbatches=choice.microbatches
    )
    placement = Schedule(
        name=choice.schedule,
        num_ranks=pp,
        num_microbatches=choice.microbatches,
        stage_ranks=owners.stage_ranks(),
        actions=(),
        mirrored=owners.mirrored(),
    )
    return balance(times, layers, [placement.stages_of(rank) for rank in range(pp)])


def simulated(choice: Choice, times: UnitTimes, stages: Stages) -> float:
    """Return how long the actions of a step take, all ranks together."""
    durations, whole = durations_of(stages, times), choice.microbatches
    lengths = list(_lengths(choice))
    spans = [_lanes(choice, length).makespan_s(durations) for length in lengths]
    while lengths:
        period = lengths[-1] - lengths[-2]
        before, last = ((spans[i] - spans[i - 1]) / (lengths[i] - lengths[i - 1]) for i in (-2, -1))
        least = _slowest_s(_lanes(choice, lengths[-1]), durations) / lengths[-1]
        if abs(last - before) <= SAME * last and last >= (1.0 - SAME) * least:
            return spans[-1] + last * (whole - lengths[-1])
        longer = lengths[-1] + 2 * period
        if longer >= whole:
            break
        lengths.append(longer)
        spans.append(_lanes(choice, longer).makespan_s(durations))
    return _lanes(choice, whole).makespan_s(durations)


def busy_s(choice: Choice, times: UnitTimes) -> float:
    """Return how long a rank computes in a step, in the mean of all ranks."""
    return choice.microbatches * sum(map(times.total_s, times.forward_s)) / choice.mesh.pp


def with_simulated(terms: Mapping[str, float], seconds: float, busy: float) -> dict[str, float]:
    """Return the terms of a step that takes `seconds`: those of the mean rank, and its bubble.

    A rank computes for `busy` seconds in the mean, and waits for the others the rest of the time.
    Closed forms charge what the slowest rank has; here that is part of the bubble.
    """
    share = min(seconds, busy) / sum(terms[name] for name in COMPUTED)
    mean = {name: share * terms[name] for name in COMPUTED}
    return {**terms, **mean, "bubble": max(0.0, seconds - busy)}


def _lengths(choice: Choice) -> tuple[int, ...]:
    """Return how many microbatches shorter steps have; none where the whole step is short.

    A period is a round of an interleaved pipeline, and even, for those that are entered at both
    ends; what is left of a step after whole periods is in all of them.
    """
    pp, whole = choice.mesh.pp, choice.microbatches
    if whole <= MOST_TIMES * pp:
        return ()
    period = pp if pp % 2 == 0 else 2 * pp
    few = tuple(whole % period + times * period for times in FEW_TIMES)
    return few if 2 * few[-1] < whole else ()


def _lanes(choice: Choice, count: int) -> Lanes:
    """Return the schedule of a plan for so many microbatches."""
    pp = choice.mesh.pp
    return lanes_of(choice.schedule, pp * choice.virtual, pp, count)


def _slowest_s(lanes: Lanes, durations: Durations) -> float:
    """Return how long the rank computes that has most to do."""
    return max(lanes.busy_s(durations))


def _unit_times(choice: Choice, blocks: Blocks, layers: int, dense_layers: int) -> UnitTimes:
    """Return the seconds of each unit of the model, as the lattice gives them."""
    forward: dict[str, float] = {}
    inputs: dict[str, float] = {}
    weights: dict[str, float] = {}
    kinds = {True: _passes(blocks.dense), False: _passes(blocks.mixture)}
    for layer in range(layers):
        unit, (first, back, own) = f"layers.{layer}", kinds[layer < dense_layers]
        again = choice.recompute != NO_RECOMPUTE and layer % choice.recompute == 0
        forward[unit], inputs[unit], weights[unit] = first, back + again * first, own
    ends = blocks.ends
    looked_up = _number(ends.embedding)
    forward[UNIT_EMBEDDING], weights[UNIT_EMBEDDING] = looked_up / 2, looked_up / 2
    inputs[UNIT_EMBEDDING] = 0.0
    forward[UNIT_HEAD] = _number(ends.head_forward)
    inputs[UNIT_HEAD] = weights[UNIT_HEAD] = _number(ends.head_backward) / 2
    return UnitTimes(
        source="modelled", forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights
    )


def _passes(block: BlockSeconds) -> tuple[float, float, float]:
    return _number(block.forward.total), _number(block.inputs.total), _number(block.weights)


def _number(value: Num) -> float:
    return float(np.asarray(value).reshape(-1)[0])
