"""Set automatic stages beside even ones on a model with a heavy head: gain, and what was promised.

The promise is that of the times which cut the stages: the formulas', or those of a file that
`echelon calibrate RUN` wrote. What the simulator says of both when it is fed with the action
times measured here is told beside it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from bench.harness.interleave import Options, say
from bench.harness.spec import Size
from bench.pipeline.plans import our_case, pipeline_plan
from bench.pipeline.report import BASELINE, Gain, gain_of, simulation_table
from bench.pipeline.simulation import enter_schedule, recorded_case, schedules_of
from bench.pipeline.spec import NUM_RANKS, PipelineVariant
from echelon.config.files.measurements import unit_times
from echelon.core.plan import Plan
from echelon.cost.seconds.stages import balance
from echelon.cost.seconds.unit_times import UnitTimes, stage_durations
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import simulate

EVEN, AUTOMATIC = "even stages", "automatic stages"


def measure_balance(options: Options, times_file: Path | None) -> int:
    """Run the rounds of both splits, print table and verdict; return how many are missed."""
    even, automatic, times = splits(options.size, times_file)
    print(f"\nautomatic stages have {sizes_of(automatic)} blocks, even ones {sizes_of(even)}")
    with contextlib.ExitStack() as stack:
        schedules = schedules_of(options, stack)
        contest = schedules.contest
        for label, plan in ((EVEN, even), (AUTOMATIC, automatic)):
            variant = PipelineVariant(schedule=BASELINE, stages=plan.layout.pipeline.stages)
            enter_schedule(schedules, recorded_case(label, variant, options))
        for number in range(options.rounds):
            say(f" round {number + 1} of {options.rounds}")
            for label in list(contest.groups):
                turn = schedules.turn(label)
                if turn is not None:
                    schedules.turns[label].append(turn)
    found = {one.label: one for one in schedules.results()}
    print(simulation_table(list(found.values()), contest.failures))
    if contest.failures or len(found) < len((EVEN, AUTOMATIC)):
        return 1
    fed = gain_of(found[AUTOMATIC], found[EVEN])
    gain = Gain(
        label=AUTOMATIC,
        baseline=EVEN,
        measured=fed.measured,
        promised=predicted_saving(even, automatic, times),
    )
    print(f"by {times.source} times: {gain.line()}")
    print(f"fed with the action times measured here: {fed.facts()}")
    return int(not gain.met)


def splits(size: Size, times_file: Path | None) -> tuple[Plan, Plan, UnitTimes]:
    """Return the plan with even stages, the one with automatic ones, and the times that cut it."""
    settings = our_case(EVEN, PipelineVariant(schedule=BASELINE)).settings(size)
    even = pipeline_plan(settings)
    times = unit_times(even, "none" if times_file is None else str(times_file))
    held = [schedule_from_plan(even).stages_of(rank) for rank in range(NUM_RANKS)]
    variant = PipelineVariant(schedule=BASELINE, stages=balance(times, size.layers, held))
    automatic = pipeline_plan(our_case(AUTOMATIC, variant).settings(size))
    return even, automatic, times


def predicted_saving(even: Plan, automatic: Plan, times: UnitTimes) -> float:
    """Return the part of a step of `even` that `automatic` saves by the simulator and `times`."""
    before, after = (
        simulate(schedule_from_plan(plan), stage_durations(plan, times)).makespan_s
        for plan in (even, automatic)
    )
    return 1 - after / before


def sizes_of(plan: Plan) -> str:
    """Return the number of blocks of each stage: ``11 + 1``."""
    return " + ".join(str(len(stage)) for stage in plan.layout.pipeline.stages)
