"""Say where the time of a pipelined step goes, rank by rank: `python -m bench.pipeline --profile`.

Every figure is the median over the steps of one turn. What a rank does between actions is told
apart: *bubble* (what it needs does not exist yet), *message* (it exists on the other rank and is on
its way), *executor* (all is there: sends and receives are posted, Python runs), *outside* (before
the first action of the step and after the last one of any rank: batches, norm, update).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence

from bench.harness.interleave import Options
from bench.pipeline.report import Simulated
from bench.pipeline.simulation import (
    enter_automatic,
    enter_schedule,
    enter_sources,
    recorded_case,
    schedules_of,
)
from bench.pipeline.spec import NUM_RANKS, PipelineVariant
from bench.pipeline.times import Step, Turn, action_times, replayed_s, shares
from echelon.schedule.action import Schedule


def profile(options: Options, names: Sequence[str]) -> int:
    """Run one turn of each schedule, alone, and print where its time went; return failures."""
    failed = 0
    for name in names:
        with contextlib.ExitStack() as stack:
            schedules = schedules_of(options, stack)
            if name == "auto":
                enter_sources(schedules)
                enter_automatic(schedules)
            else:
                variant = PipelineVariant(schedule=name)
                enter_schedule(schedules, recorded_case(name, variant, options))
            turn = schedules.turn(name) if name in schedules.built else None
        if turn is None:
            failed += 1
            print(f"\n{name} did not run: {schedules.contest.failures.get(name)}")
            continue
        print("\n" + profile_text(name, schedules.built[name], turn))
    return failed


def profile_text(name: str, schedule: Schedule, turn: Turn) -> str:
    """Return the table of one schedule's turn, and its actions."""
    told = Simulated.of(name, schedule, [turn])
    lines = [
        told.line(),
        f"with the very times of all actions: {replayed_s(schedule, turn):.3f} s;"
        f" a message alone: {_ms(turn.transfer_s)} ms",
        "",
        "| rank | busy ms | bubble | message | executor | outside | longest gaps with all there |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_rank_line(schedule, turn, rank) for rank in range(NUM_RANKS)]
    lines += [
        "",
        "| action | stage | median ms | least | most | first of a step |",
        "|---|---|---|---|---|---|",
    ]
    for kind, stage in action_times(turn.steps):
        lines.append(_action_line(turn.steps, kind.value, stage))
    return "\n".join(lines)


def _rank_line(schedule: Schedule, turn: Turn, rank: int) -> str:
    each = [shares(schedule, step, rank, turn.transfer_s) for step in turn.steps]
    busy = {kind: statistics.median(one.busy_s[kind] for one in each) for kind in each[0].busy_s}
    total = sum(busy.values())
    by_kind = ", ".join(f"{kind.value} {_ms(seconds)}" for kind, seconds in sorted(busy.items()))
    gaps = sorted(
        ((gap.seconds, f"{_ms(gap.seconds)} before {gap.before}") for gap in each[-1].gaps),
        reverse=True,
    )
    cells = (
        str(rank),
        f"{_ms(total)} ({by_kind})",
        *(
            _ms(statistics.median(values))
            for values in zip(
                *((one.bubble_s, one.message_s, one.executor_s, one.outside_s) for one in each),
                strict=True,
            )
        ),
        ", ".join(text for _, text in gaps[:3]),
    )
    return f"| {' | '.join(cells)} |"


def _action_line(steps: Sequence[Step], kind: str, stage: int) -> str:
    taken: list[float] = []
    firsts: list[float] = []
    for step in steps:
        mine = [
            (event.start, event.end - event.start)
            for action, event in step.actions.items()
            if (action.kind.value, action.stage) == (kind, stage)
        ]
        taken += [seconds for _, seconds in mine]
        firsts.append(min(mine)[1])
    middle, first = statistics.median(taken), statistics.median(firsts)
    return (
        f"| {kind} | {stage} | {_ms(middle)} | {_ms(min(taken))} | {_ms(max(taken))}"
        f" | {_ms(first)} |"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
