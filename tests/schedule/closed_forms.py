"""Hold the simulator and the checker against every closed form of a builder, without tolerance.

Times are whole numbers, so every simulated second is exact in a float, and both bubbles are one
correctly rounded division of the same two whole numbers on either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from echelon.schedule.build import SCHEDULES, builder_of
from echelon.schedule.builders.builder import EQUAL_TIMES, ActionTimes, Builder
from echelon.schedule.check import (
    check_schedule,
    peak_in_flight_per_rank,
    peak_in_flight_per_stage,
)
from echelon.schedule.simulate import Durations, Simulation, simulate


def times_of(forward: int, input_gradient: int, weight_gradient: int) -> ActionTimes:
    """Return whole seconds for F, B and W."""
    return ActionTimes(
        forward_s=forward, input_gradient_s=input_gradient, weight_gradient_s=weight_gradient
    )


def durations_of(num_stages: int, times: ActionTimes) -> Durations:
    """Return equal stages and free transfers."""
    return Durations(
        forward_s=(times.forward_s,) * num_stages,
        backward_s=(times.backward_s,) * num_stages,
        input_gradient_s=(times.input_gradient_s,) * num_stages,
        weight_gradient_s=(times.weight_gradient_s,) * num_stages,
        transfer_s=(0,) * (num_stages - 1),
    )


def simulated(builder: Builder, times: ActionTimes = EQUAL_TIMES) -> Simulation:
    """Return the simulation of what `builder` builds."""
    return simulate(builder.schedule(), durations_of(builder.num_stages, times))


def closed_form_holds(builder: Builder, times: ActionTimes = EQUAL_TIMES) -> bool:
    """Return whether `idle_s` is exact; that of ZB-V is where m >= 2p-1 or F = B = W."""
    equal = times.forward_s == times.input_gradient_s == times.weight_gradient_s
    enough = builder.num_microbatches >= 2 * builder.num_ranks - 1
    return builder.name != "zb-v" or equal or enough


def longest_wait_inside(result: Simulation) -> float:
    """Return the longest wait of a rank between its own first start and its own last end."""
    waits: list[float] = []
    for rank, busy in enumerate(result.busy_s):
        own = [event for event in result.events if event.rank == rank and event.kind != "send"]
        span = max(event.end for event in own) - min(event.start for event in own)
        waits.append(span - busy)
    return max(waits)


def differences(
    builder: Builder, times: list[ActionTimes], *, proves: bool = True
) -> Iterator[str]:
    """Yield each closed form of `builder` that its schedule does not have.

    `proves` says whether the schedule is checked first: otherwise it is only run and counted.
    """
    schedule = builder.schedule()
    if proves:
        check_schedule(schedule)
    ranks, stages = range(builder.num_ranks), range(builder.num_stages)
    pairs: list[tuple[str, object, object]] = [
        (
            "peak per rank",
            peak_in_flight_per_rank(schedule),
            tuple(builder.peak_in_flight_of_rank(rank) for rank in ranks),
        ),
        (
            "peak per stage",
            peak_in_flight_per_stage(schedule),
            tuple(builder.peak_in_flight(stage) for stage in stages),
        ),
    ]
    for one in times:
        if not closed_form_holds(builder, one):
            continue
        result = simulate(schedule, durations_of(builder.num_stages, one))
        sent = sum(event.kind == "send" for event in result.events)
        fraction, overhead = builder.bubble_fraction(one), builder.bubble_overhead(one)
        pairs += [
            (f"idle {one}", result.idle_s, (builder.idle_s(one),) * builder.num_ranks),
            (f"fraction {one}", result.bubble_fraction, fraction),
            (f"overhead {one}", result.bubble_overhead, overhead),
            ("messages", sent, builder.num_messages()),
        ]
    for what, found, expected in pairs:
        if found != expected:
            yield f"{builder}: {what} is {found}, not {expected}"


def builders(
    num_ranks: int, num_microbatches: int, virtual_stages: tuple[int, ...] = (1, 2, 3)
) -> Iterator[Builder]:
    """Yield a builder of each schedule that these numbers fit, for each number of stages."""
    for name, kind in SCHEDULES.items():
        if kind.fits_ranks(num_ranks) and kind.allows_microbatches(num_ranks, num_microbatches):
            for virtual in filter(kind.fits_virtual_stages, virtual_stages):
                yield builder_of(
                    name,
                    num_stages=kind.stages_for(num_ranks, virtual),
                    num_ranks=num_ranks,
                    num_microbatches=num_microbatches,
                )


def some_times(seed: int, count: int) -> list[ActionTimes]:
    """Return F = B = W, and `count` others at random."""
    rng = Random(seed)
    drawn = [times_of(*(rng.randint(1, 9) for _ in range(3))) for _ in range(count)]
    return [EQUAL_TIMES, *drawn]
