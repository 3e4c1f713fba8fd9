# SPDX-License-Identifier: Apache-2.0
"""The part of `echelon plan` about the pipeline: stages, schedule, and how they lie in time.

Everything is read from `cost/` and `schedule/`. The drawing has free transfers, as the order of the
actions and the lengths of the stages are what it is for; the text says what transfers add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.cost.seconds.stages import imbalance, split_layers
from echelon.cost.seconds.unit_times import UnitTimes, stage_durations
from echelon.planner.report.printed_numbers import Identity, require_identities
from echelon.planner.view.text_layout import WIDTH
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.check import peak_in_flight_per_rank
from echelon.schedule.draw import draw_timeline
from echelon.schedule.from_plan import schedule_from_plan, stage_placement_from_plan
from echelon.schedule.messages import ScheduleMessages
from echelon.schedule.simulate import Durations, Simulation, simulate

MOST_DRAWN_STAGES = 16  # stages
MOST_DRAWN_MICROBATCHES = 16  # microbatches
MOST_SIMULATED = 50_000  # actions
MOST_SHOWN = 24  # stages
_LEAST_WORK = 1e-4  # of the makespan of all ranks
ENOUGH_FOR_EACH_RANK = 4
"""Microbatches for each pipeline rank from which on the bubble of 1F1B is small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """A schedule in time: stages as long as they are, with transfers and without, or all alike."""

    schedule: Schedule
    plain: Simulation
    sent: Simulation
    even: Simulation
    num_messages: int


def pipeline_parts(
    plan: Plan, times: UnitTimes, found: str = "", *, columns: int = WIDTH
) -> Iterator[str]:
    """Yield the paragraphs about a pipeline of several stages; `found` tells of a search."""
    yield stages_text(plan, times)
    timing = _timing(plan, times)
    name = plan.layout.pipeline.schedule
    if timing is None:
        yield f"Each pipeline rank runs {name}."
        return
    head = "\n".join(_timing_lines(plan, timing, times, found))
    small = plan.num_stages <= MOST_DRAWN_STAGES
    if not small or plan.num_microbatches > MOST_DRAWN_MICROBATCHES:
        yield head
        return
    lines = draw_timeline(timing.plain.events, columns - 1).splitlines()
    one_each = all(held == (rank,) for rank, held in enumerate(_held(plan)))
    word = "stage" if one_each else "pp"
    drawn = [line.replace("rank", word, 1) for line in lines]
    head += "\n(F forward, B backward, W weight gradients, a dot is waiting; transfers left out)"
    yield f"{head}:\n\n" + "\n".join(drawn)


def stages_text(plan: Plan, times: UnitTimes) -> str:
    """Return how many blocks each stage has, and how far from equal the ranks are with them."""
    stages, held = plan.layout.pipeline.stages, _held(plan)
    even = split_layers(plan.model.layers, plan.num_stages)
    counts = _shown([len(stage) for stage in stages])
    now = imbalance(stages, held, times)
    text = f"Stages: {counts} blocks, slowest rank {now:.2f}x of the mean"
    if stages == even:
        text += " (the even split)"
    else:
        text += f"; even split {imbalance(even, held, times):.2f}x"
    return f"{text}, by {times.source} times."


def pipeline_json(plan: Plan, times: UnitTimes) -> dict[str, Any]:
    """Return the stages and the schedule as JSON values."""
    held, durations = _held(plan), stage_durations(plan, times)
    even = split_layers(plan.model.layers, plan.num_stages)
    timing = _timing(plan, times)
    return {
        "schedule": plan.layout.pipeline.schedule,
        "stages_of_rank": [list(stages) for stages in held],
        "blocks": [len(stage) for stage in plan.layout.pipeline.stages],
        "times": times.source,
        "imbalance": imbalance(plan.layout.pipeline.stages, held, times),
        "even_imbalance": imbalance(even, held, times),
        "durations_s": {
            "F": list(durations.forward_s),
            "B": list(durations.input_gradient_s),
            "W": list(durations.weight_gradient_s),
            "transfer": list(durations.transfer_s),
        },
        "timing": None if timing is None else _timing_json(timing, durations),
    }


def schedule_identities(
    at: str, schedule: Schedule, numbers: Mapping[str, Any]
) -> Iterator[Identity]:
    """Yield counts of a schedule, each counted anew from its actions."""
    place = {(a.stage, a.microbatch): r for r, row in enumerate(schedule.actions) for a in row}
    crossed = sum(place.get((s + 1, m), rank) != rank for (s, m), rank in place.items())
    by = "activations and gradients that leave a rank"
    yield Identity(f"{at}num_messages", numbers["num_messages"], 2 * crossed, by)
    by = "microbatches between F and the end of BW or W"
    for key in ("peak_in_flight_of_rank", "peak_in_flight_per_rank"):
        for rank, most in enumerate(numbers.get(key, ())):
            held = _most_held(schedule.actions[rank])
            yield Identity(f"{at}{key}[{rank}]", most, held, by)
    for stage, most in enumerate(numbers.get("peak_in_flight_per_stage", ())):
        rows = ([action for action in row if action.stage == stage] for row in schedule.actions)
        name = f"{at}peak_in_flight_per_stage[{stage}]"
        yield Identity(name, most, max(map(_most_held, rows)), by)


def _most_held(actions: Sequence[Action]) -> int:
    """Microbatches whose forward pass has begun and whose last backward action has not ended."""
    begun = accumulate(action.kind is ActionKind.F for action in actions)
    last = ActionKind.BW, ActionKind.W
    ended = accumulate((action.kind in last for action in actions), initial=0)
    return max(
        (num_begun - num_ended for num_begun, num_ended in zip(begun, ended, strict=False)),
        default=0,
    )


def simulation_identities(
    at: str, schedule: Schedule, durations: Durations, simulation: Simulation
) -> Iterator[Identity]:
    """Yield the makespan and the bubble of a simulated schedule, from its events and actions."""
    ends = [event.end for event in simulation.events if event.kind != "send"]
    yield Identity(f"{at}makespan", simulation.makespan_s, max(ends), "the end of the last action")
    kinds = {
        "F": durations.forward_s,
        "B": durations.input_gradient_s,
        "W": durations.weight_gradient_s,
        "BW": durations.backward_s,
    }
    actions = [action for row in schedule.actions for action in row]
    work = sum(kinds[action.kind.value][action.stage] for action in actions)
    makespans = len(schedule.actions) * max(ends)
    idle = 1.0 - work / makespans if makespans else 0.0
    by = "1 - work / (ranks x makespan)"
    yield Identity(f"{at}bubble_fraction", simulation.bubble_fraction, idle, by)
    # Of a long makespan, the ends of short actions are rounded.
    if work > _LEAST_WORK * makespans:
        over, by = makespans / work - 1.0, "ranks x makespan / work - 1"
        yield Identity(f"{at}bubble_overhead", simulation.bubble_overhead, over, by)


def _timing_json(timing: _Timing, durations: Durations) -> dict[str, Any]:
    numbers = {
        "makespan_s": timing.sent.makespan_s,
        "bubble_fraction": timing.plain.bubble_fraction,
        "bubble_fraction_with_transfers": timing.sent.bubble_fraction,
        "bubble_fraction_of_equal_stages": timing.even.bubble_fraction,
        "peak_in_flight_of_rank": list(peak_in_flight_per_rank(timing.schedule)),
        "num_messages": timing.num_messages,
    }
    at, schedule = "pipeline.timing.", timing.schedule
    require_identities(
        (
            *schedule_identities(at, schedule, numbers),
            *simulation_identities(at, schedule, durations.without_transfers(), timing.plain),
            *simulation_identities(f"{at}with_transfers.", schedule, durations, timing.sent),
            *simulation_identities(
                f"{at}equal_stages.", schedule, Durations.uniform(schedule.num_stages), timing.even
            ),
        )
    )
    return numbers


def _timing(plan: Plan, times: UnitTimes) -> _Timing | None:
    """Return the schedule in time, or None for more actions than are worth the seconds."""
    if 3 * plan.num_stages * plan.num_microbatches > MOST_SIMULATED:
        return None
    schedule, durations = schedule_from_plan(plan), stage_durations(plan, times)
    channels = ScheduleMessages.from_schedule(schedule).channels.values()
    return _Timing(
        schedule=schedule,
        plain=simulate(schedule, durations.without_transfers()),
        sent=simulate(schedule, durations),
        even=simulate(schedule, Durations.uniform(plan.num_stages)),
        num_messages=sum(map(len, channels)),
    )


def _timing_lines(plan: Plan, timing: _Timing, times: UnitTimes, found: str) -> Iterator[str]:
    name = plan.layout.pipeline.schedule
    bubbles = [timing.plain.bubble_fraction, timing.sent.bubble_fraction]
    plain, sent = (f"{100 * bubble:.1f} %" for bubble in bubbles)
    yield (
        f"Each pipeline rank runs {name}. Of the step {plain} is bubble, {sent} with transfers, "
        f"and {100 * timing.even.bubble_fraction:.1f} % if all stages took equally long."
    )
    yield from _few_microbatches(plan, timing)
    if found:
        yield f"The search has found {found}."
    peaks = peak_in_flight_per_rank(timing.schedule)
    what = "stages x microbatches" if max(map(len, _held(plan))) > 1 else "microbatches"
    if len(set(peaks)) > 1:
        yield f"Most activations on each rank, in {what}: {_shown(peaks)}."
    else:
        yield f"Ranks hold activations of at most {peaks[0]} {what}."
    size = decimal_bytes(times.message_bytes)
    each = " for each tensor rank" if plan.mesh.tp > 1 else ""
    yield f"A pipeline sends {timing.num_messages} messages of {size} in a step{each}."


def _few_microbatches(plan: Plan, timing: _Timing) -> Iterator[str]:
    """Warn where so few microbatches leave more bubble than the rule of m >= 4 p does.

    1F1B with m = 4 p waits for (p-1) / (5p-1) of a step (Huang et al., GPipe, 2019, section 3.2,
    call the bubble negligible from there on).
    """
    ranks = plan.mesh.pp
    enough, rule = ENOUGH_FOR_EACH_RANK * ranks, (ranks - 1) / (5 * ranks - 1)
    if plan.num_microbatches < enough and timing.even.bubble_fraction > rule:
        yield (
            f"warning: {plan.num_microbatches} microbatches are few for {ranks} ranks: with "
            f"{enough}, 1f1b would wait for {100 * rule:.1f} % of a step."
        )


def _shown(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    if len(texts) > MOST_SHOWN:
        texts = [*texts[: MOST_SHOWN // 2], "...", *texts[-MOST_SHOWN // 2 :]]
    return " ".join(texts)


def _held(plan: Plan) -> tuple[tuple[int, ...], ...]:
    placement = stage_placement_from_plan(plan)
    return tuple(placement.stages_of(rank) for rank in range(placement.num_ranks))
