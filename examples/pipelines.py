"""Every schedule with one stage on a rank, and one that is searched, where stages are unequal.

    python examples/pipelines.py

Four ranks, eight microbatches. The last stage has the head and takes half as long again, a message
takes a tenth of a forward pass. The search is told how many microbatches each rank may hold. No
process is started: schedules are lists of actions, and these are checked and simulated. What the
ten schedules cost where all stages are equal: `echelon explain pipeline -p 4 -m 8`.
"""

from __future__ import annotations

from echelon.schedule.action import Schedule
from echelon.schedule.automatic import find_schedule
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import check_schedule
from echelon.schedule.draw import draw_timeline
from echelon.schedule.simulate import Durations, simulate

RANKS = 4
MICROBATCHES = 8
HEAVY = 1.5
"""How long the last stage takes, the others taking 1."""
MESSAGE = 0.1

STAGES = (1.0,) * (RANKS - 1) + (HEAVY,)
TIMES = Durations(
    forward_s=STAGES,
    backward_s=tuple(2 * stage for stage in STAGES),
    input_gradient_s=STAGES,
    weight_gradient_s=STAGES,
    transfer_s=(MESSAGE,) * (RANKS - 1),
)


LIMITS = ((4, 3, 2, 1), (4, 4, 4, 4), (3, 3, 3, 3), (2, 2, 2, 2))
"""What each rank may hold; the first is what it holds under 1f1b."""


def main() -> None:
    """Print what each schedule takes and what its ranks hold, and draw the last one."""
    numbers = {"num_stages": RANKS, "num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    print(f"{RANKS} ranks, {MICROBATCHES} microbatches, F = B = W; the last stage takes {HEAVY} F,")
    print(f"a message {MESSAGE} F. Each rank holds at most so many microbatches:\n")
    print("schedule  a step   no less  ranks hold")
    for name, kind in SCHEDULES.items():
        # Two copies of the stages would be another model to compare with.
        if kind.microbatch_multiple == 1 and not schedule_problems(name, **numbers):
            _say(build_schedule(name, **numbers))
    for limit in LIMITS:
        found = find_schedule(tuple(range(RANKS)), MICROBATCHES, TIMES, most_in_flight=limit)
        _say(found.schedule, f"{found.lower_bound_s:.1f} F")
    print("\nThe third that was found:\n")
    found = find_schedule(tuple(range(RANKS)), MICROBATCHES, TIMES, most_in_flight=LIMITS[2])
    print(draw_timeline(simulate(found.schedule, TIMES).events, unit="F"), end="")


def _say(schedule: Schedule, least: str = "-") -> None:
    held = " ".join(map(str, check_schedule(schedule).peak_in_flight_per_rank))
    span = max(event.end for event in simulate(schedule, TIMES).events)
    print(f"{schedule.name:<8} {span:>5.1f} F   {least:>7}  {held}")


if __name__ == "__main__":
    main()
