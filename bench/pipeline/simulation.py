"""Run every schedule beside what the simulator says of it, fed with measured action times."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.harness.catalogue import Case
from bench.harness.interleave import Contest, Options, on_one_host, say
from bench.pipeline.plans import our_case, pipeline_plan
from bench.pipeline.report import MUST_GAIN, Simulated, gains, simulation_table
from bench.pipeline.spec import NUM_MICROBATCHES, NUM_RANKS, PipelineVariant
from bench.pipeline.times import Kind, Turn, action_times, durations, read_turn
from echelon.core.errors import EchelonError
from echelon.schedule.action import Schedule
from echelon.schedule.automatic import find_schedule
from echelon.schedule.from_plan import schedule_from_plan

SEARCHED_FROM = ("1f1b", "zb-h1")
"""Whose action times the search is fed with: whole backward passes, and split ones."""


@dataclass(slots=True)
class Schedules:
    """The live cases of Echelon, one per schedule, with what they did turn by turn."""

    options: Options
    contest: Contest
    stack: contextlib.ExitStack
    built: dict[str, Schedule] = field(default_factory=dict)
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def enter(self, case: Case, schedule: Schedule) -> None:
        """Start a case and run its first step."""
        self.contest.enter(case, self.stack, on_one_host)
        if case.label in self.contest.groups:
            self.built[case.label] = schedule
            self.turns[case.label] = []

    def turn(self, label: str) -> Turn | None:
        """Let one case run and return what it did; None where it fails, after which it is out."""
        taken = self.contest.turn(label, warmup=self.options.warmup, steps=self.options.steps)
        if taken is None:
            return None
        variant = PipelineVariant.parse(self.contest.groups[label][0].case.variant)
        return read_turn(Path(variant.events), num_ranks=NUM_RANKS, steps=self.options.steps)

    def results(self) -> list[Simulated]:
        """Return every schedule that took a turn, beside its simulation."""
        return [
            Simulated.of(label, self.built[label], turns)
            for label, turns in self.turns.items()
            if turns
        ]


def recorded_case(label: str, variant: PipelineVariant, options: Options) -> Case:
    """Return Echelon with a variant, what its ranks do written below the logs."""
    return our_case(label, replace(variant, events=str(options.logs / f"events-{label}")))


def measure_simulation(options: Options, names: Sequence[str]) -> int:
    """Run the rounds of all schedules, print table and verdicts; return how many are missed."""
    with contextlib.ExitStack() as stack:
        schedules = schedules_of(options, stack)
        for name in names:
            if name != "auto":
                case = recorded_case(name, PipelineVariant(schedule=name), options)
                enter_schedule(schedules, case)
        if "auto" in names:
            enter_automatic(schedules)
        for number in range(options.rounds):
            say(f" round {number + 1} of {options.rounds}")
            for label in list(schedules.contest.groups):
                turn = schedules.turn(label)
                if turn is not None:
                    schedules.turns[label].append(turn)
    return _judge(schedules)


def enter_schedule(schedules: Schedules, case: Case) -> None:
    """Start a case whose schedule can be built; say why where it cannot."""
    try:
        schedule = schedule_from_plan(pipeline_plan(case.settings(schedules.options.size)))
    except EchelonError as error:
        schedules.contest.failures[case.label] = " ".join(str(error).split())[:300]
        return
    schedules.enter(case, schedule)


def enter_automatic(schedules: Schedules) -> None:
    """Start the schedule that a search finds for action times measured in one turn."""
    try:
        variant = PipelineVariant(schedule="auto", rows=_searched(schedules))
    except (EchelonError, LookupError) as error:
        schedules.contest.failures["auto"] = str(error)
        return
    enter_schedule(schedules, recorded_case("auto", variant, schedules.options))


def automatic_rows_here(options: Options) -> tuple[str, ...]:
    """Return the actions that the search finds for this machine, once measured for that.

    LookupError where no schedule runs whose action times it could be fed with.
    """
    with contextlib.ExitStack() as stack:
        schedules = schedules_of(options, stack)
        enter_sources(schedules)
        return _searched(schedules)


def enter_sources(schedules: Schedules) -> None:
    """Start the schedules whose action times the search is fed with, where they do not run yet."""
    for name in SEARCHED_FROM:
        if name not in schedules.built:
            case = recorded_case(name, PipelineVariant(schedule=name), schedules.options)
            enter_schedule(schedules, case)


def schedules_of(options: Options, stack: contextlib.ExitStack) -> Schedules:
    """Return a contest without cases yet, which `stack` ends."""
    contest = Contest(logs=options.logs, size=options.size)
    return Schedules(options=options, contest=contest, stack=stack)


def _searched(schedules: Schedules) -> tuple[str, ...]:
    turns = [schedules.turn(name) for name in SEARCHED_FROM if name in schedules.built]
    found = automatic_rows([turn for turn in turns if turn is not None])
    if not found:
        raise LookupError(f"needs the action times of {' or '.join(SEARCHED_FROM)}")
    return found


def automatic_rows(turns: Sequence[Turn]) -> tuple[str, ...]:
    """Return the actions of each rank that the search finds for times of `turns`; () without."""
    if not turns:
        return ()
    times: dict[Kind, float] = {}
    for turn in turns:
        times |= action_times(turn.steps)
    fed = durations(times, max(turn.transfer_s for turn in turns))
    found = find_schedule(tuple(range(NUM_RANKS)), NUM_MICROBATCHES, fed)
    return tuple(" ".join(map(str, row)) for row in found.schedule.actions)


def _judge(schedules: Schedules) -> int:
    found, failures = schedules.results(), schedules.contest.failures
    print(f"\n{simulation_table(found, failures)}")
    lines = [(one.line(), one.met) for one in found]
    lines += [
        (gain.line(), gain.met) if gain.label in MUST_GAIN else (gain.facts(), True)
        for gain in gains(found)
    ]
    for line, _ in lines:
        print(line)
    return sum(not met for _, met in lines) + len(failures)
