"""A plan of a search timed event by event: its schedule, with stages as they are really cut.

Closed forms take all ranks for as slow as the one with most blocks. Here blocks are cut so that the
slowest rank is as fast as it can be, and the actions of the schedule are timed one by one with the
seconds of blocks and ends that the lattice gives; messages keep their closed form.

A step of many microbatches is the same pattern over and over: where there are more than MOST_TIMES
as many as pipeline ranks, the first few are timed, and each of the others adds what the last of
those added. What is still too long keeps its closed form.
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
from echelon.planner.pins import NO_RECOMPUTE
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.clock import Clock
from echelon.schedule.simulate import Durations, simulate

Stages = tuple[tuple[int, ...], ...]

MOST_TIMES = 4
FEW_TIMES = (2, 3)
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
    """Return how many actions are timed for a plan."""
    counts = _timed(choice)
    return 3 * sum(counts) * choice.mesh.pp * choice.virtual


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
    counts = _timed(choice)
    durations = durations_of(stages, times)
    spans: list[float] = []
    for count in counts:
        schedule = build_schedule(
            choice.schedule,
            num_stages=choice.mesh.pp * choice.virtual,
            num_ranks=choice.mesh.pp,
            num_microbatches=count,
        )
        if schedule.mirrored:
            spans.append(simulate(schedule, durations).makespan_s)
        else:
            spans.append(_makespan_s(schedule.stage_ranks, count, durations, schedule))
    seconds = spans[-1]
    if len(counts) > 1:
        each = (spans[1] - spans[0]) / (counts[1] - counts[0])
        seconds += each * (choice.microbatches - counts[1])
    return seconds


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


def _timed(choice: Choice) -> tuple[int, ...]:
    """Return for how many microbatches a schedule is timed."""
    few = tuple(times * 2 * ((choice.mesh.pp + 1) // 2) for times in FEW_TIMES)
    if choice.microbatches > MOST_TIMES * choice.mesh.pp and choice.microbatches > few[1]:
        return few
    return (choice.microbatches,)


def _makespan_s(
    ranks: tuple[int, ...], count: int, durations: Durations, schedule: Schedule
) -> float:
    clock = Clock(ranks, count, durations)
    timing = clock.run(clock.rows_of(schedule))
    assert timing is not None, "a builder's schedule does not wait for itself"
    return timing.makespan_s


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
