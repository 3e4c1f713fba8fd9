"""What the page says of a schedule is what the engine says: words, circles and times, in node."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from echelon.core.errors import InfeasiblePlan, Problem
from echelon.core.rulebook.pipeline import SCHEDULE_CANNOT_DEADLOCK
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import check_schedule, peak_in_flight_per_rank
from echelon.schedule.deadlock import draw_deadlock, find_deadlock
from echelon.schedule.files import read_schedule_file
from echelon.schedule.simulate import simulate
from tests.schedule.examples import listed
from tests.schedule.mutations import mutated
from tests.web.test_formulas import COMPILED, node
from web.formulas.schedules import (
    ActionLengths,
    ScheduleVerdict,
    durations_of,
    schedule_names,
    schedule_of_words,
    schedule_start,
    schedule_text,
    schedule_verdict,
)

ASKS = """
import { readFileSync, writeFileSync } from "node:fs";
import * as page from "%s/formulas.js";
const asked = JSON.parse(readFileSync(process.argv[2]));
const told = (one) => [one.rule, one.message, one.key, one.set_by, one.suggestions];
const words = (schedule) => schedule.actions.map((row) => row.map(String));
const starts = asked.starts.map((one) => {
  const { problems, schedule } = page.schedule_start(...one);
  return [problems.map(told), schedule && [words(schedule), page.schedule_text(schedule)]];
});
const verdicts = asked.schedules.map(([schedule, lengths, limit]) => {
  const made = page.schedule_of_words(...schedule);
  const found = page.schedule_verdict(made, page.lengths_of(...lengths), limit);
  const { circle, drawing, in_flight, simulation } = found;
  const events = ({ kind, name, axis, stage, microbatch, start, end, rank }) => [
    kind, name, axis, stage, microbatch, start, end, rank,
  ];
  return {
    problems: found.problems.map(told),
    circle: circle.map((one) => [
      one.rank, String(one.action), String(one.awaited_action), one.awaited_rank,
    ]),
    drawing, in_flight,
    events: simulation && simulation.events.map(events),
    times: simulation && [simulation.makespan_s, simulation.busy_s],
    shares: simulation && [
      ...simulation.idle_s, simulation.bubble_fraction, simulation.bubble_overhead,
    ],
    text: page.schedule_text(made),
  };
});
writeFileSync(process.argv[3], JSON.stringify({ names: page.schedule_names(), starts, verdicts }));
"""

Start = tuple[str, int, int, int]
Case = tuple[Schedule, ActionLengths, int | None]
EQUAL = ActionLengths(forward_s=1, input_gradient_s=1, weight_gradient_s=1, transfer_s=0)


def of_page(tmp_path: Path, starts: list[Start], cases: list[Case]) -> dict[str, Any]:
    """Return what the compiled code says of starts and schedules, in one process."""
    script, asked, told = tmp_path / "ask.mjs", tmp_path / "asked.json", tmp_path / "told.json"
    script.write_text(ASKS % COMPILED.as_uri(), encoding="utf-8")
    rows = [(_arguments(one), _lengths(lengths), limit) for one, lengths, limit in cases]
    asked.write_text(json.dumps({"starts": starts, "schedules": rows}), encoding="utf-8")
    done = subprocess.run(
        [*node(), str(script), str(asked), str(told)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(told.read_text(encoding="utf-8"))


def _arguments(one: Schedule) -> tuple[Any, ...]:
    rows = [[(a.kind.value, a.stage, a.microbatch) for a in row] for row in one.actions]
    return one.name, one.num_microbatches, one.stage_ranks, one.mirrored, rows


def _lengths(one: ActionLengths) -> tuple[float, ...]:
    return one.forward_s, one.input_gradient_s, one.weight_gradient_s, one.transfer_s


def random_cases(seed: int, count: int) -> list[Case]:
    """Return schedules of which about half run, with lengths and limits."""
    random, cases = Random(seed), list[Case]()
    for number in range(count):
        one = random.randrange(2**32)
        made = mutated(one) if number % 2 else listed(one, may_deadlock=True)
        made = replace(made, num_ranks=len(made.actions))
        lengths = ActionLengths(
            forward_s=random.choice((1, 0.7, 2.5)),
            input_gradient_s=random.choice((1, 0.9)),
            weight_gradient_s=random.choice((1, 0.3)),
            transfer_s=random.choice((0, 0, 0.25)),
        )
        cases.append((made, lengths, random.choice((None, None, 1, 3, 5))))
    return cases


def told(problems: tuple[Problem, ...] | list[Problem]) -> list[list[Any]]:
    return [[p.rule, p.message, p.key, p.set_by, [*p.suggestions]] for p in problems]


def require_verdict(found: dict[str, Any], case: Case, wanted: ScheduleVerdict) -> None:
    """The page's verdict is Python's, to the last bit of a time."""
    assert found["problems"] == told([*wanted.problems])
    assert found["circle"] == [
        [one.rank, str(one.action), str(one.awaited_action), one.awaited_rank]
        for one in wanted.circle
    ]
    assert found["drawing"] == wanted.drawing
    assert found["in_flight"] == [*wanted.in_flight]
    assert found["text"] == schedule_text(case[0]) == case[0].to_json()
    timed = wanted.simulation
    if timed is None:
        assert found["events"] is found["times"] is found["shares"] is None
        return
    assert found["events"] == [
        [e.kind, e.name, e.axis, e.stage, e.microbatch, e.start, e.end, e.rank]
        for e in timed.events
    ]
    assert found["times"] == [timed.makespan_s, [*timed.busy_s]]
    # Python adds up with less rounding from 3.12 on, so that the last bit of a sum may differ.
    shares = (*timed.idle_s, timed.bubble_fraction, timed.bubble_overhead)
    assert found["shares"] == pytest.approx(shares, rel=1e-12, abs=1e-12)


def refused(schedule: Schedule, limits: tuple[int, ...] | None) -> list[Problem]:
    """Return what the checker refuses a schedule for."""
    try:
        check_schedule(schedule, most_in_flight=limits)
    except InfeasiblePlan as error:
        return [*error.problems]
    return []


def require_engine(case: Case, verdict: ScheduleVerdict) -> None:
    """The verdict is that of the commands: of the checker, the circle's search, the simulator."""
    schedule, lengths, limit = case
    limits = None if limit is None else (limit,) * schedule.num_ranks
    problems = refused(schedule, limits)
    assert told(problems) == told([*verdict.problems])
    deadlock = [one.rule for one in problems] == [SCHEDULE_CANNOT_DEADLOCK.id]
    assert bool(verdict.circle) == deadlock
    if deadlock:
        assert verdict.circle == find_deadlock(schedule)
        assert verdict.drawing == draw_deadlock(schedule, tuple(verdict.circle))
    if problems:
        return
    report = check_schedule(schedule, most_in_flight=limits)
    assert verdict.simulation == simulate(schedule, durations_of(schedule, lengths))
    assert verdict.in_flight == report.peak_in_flight_per_rank == peak_in_flight_per_rank(schedule)


def all_starts() -> list[Start]:
    return [
        (name, ranks, virtual, microbatches)
        for name in SCHEDULES
        for ranks in range(1, 9)
        for virtual in range(1, 5)
        for microbatches in range(1, 17)
    ]


def require_equal(tmp_path: Path, starts: list[Start], cases: list[Case]) -> Counter[str]:
    """Hold the page to Python, and Python to the commands; return the rules that were broken."""
    found, broken = of_page(tmp_path, starts, cases), Counter[str]()
    assert found["names"] == schedule_names() == [*SCHEDULES]
    for start, (problems, built) in zip(starts, found["starts"], strict=True):
        name, ranks, virtual, microbatches = start
        numbers = {"num_stages": ranks * virtual, "num_ranks": ranks}
        wanted = schedule_problems(name, **numbers, num_microbatches=microbatches)
        assert problems == told(wanted)
        assert bool(built) == (not wanted)
        if built:
            made = build_schedule(name, **numbers, num_microbatches=microbatches)
            assert built == [[[str(a) for a in row] for row in made.actions], made.to_json()]
            assert schedule_start(*start).schedule == made
    for one, case in zip(found["verdicts"], cases, strict=True):
        verdict = schedule_verdict(*case)
        require_verdict(one, case, verdict)
        require_engine(case, verdict)
        broken.update({p.rule for p in verdict.problems} or {"none"})
    return broken


def test_the_page_judges_builds_and_times_as_the_engine_does(tmp_path: Path) -> None:
    starts = Random(1).sample(all_starts(), 200)
    broken = require_equal(tmp_path, starts, random_cases(2, 300))
    assert {*broken} >= {
        *("none", "schedule-places-stages", "schedule-covers-once", "schedule-keeps-order"),
        *("schedule-cannot-deadlock", "schedule-within-memory"),
    }
    assert min(broken.values()) >= 10


@pytest.mark.slow
def test_the_page_builds_every_schedule_that_can_be_chosen(tmp_path: Path) -> None:
    starts = all_starts()
    cases: list[Case] = [
        (built, EQUAL, None)
        for start in Random(3).sample(starts, 600)
        if (built := schedule_start(*start).schedule) is not None
    ]
    assert len(cases) > 50
    assert {*require_equal(tmp_path, starts, cases)} == {"none"}


@pytest.mark.slow
def test_the_page_judges_thousands_of_schedules(tmp_path: Path) -> None:
    require_equal(tmp_path, [], random_cases(4, 4000))


def test_the_text_of_a_schedule_is_a_file_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "built.json"
    for name in ("1f1b", "dualpipe", "zb-v"):
        virtual = 2 if name == "zb-v" else 1
        built = schedule_start(name, 4, virtual, 8).schedule
        assert built is not None
        path.write_text(schedule_text(built), encoding="utf-8")
        assert read_schedule_file(path).schedule == built


def test_words_are_the_actions_of_a_schedule() -> None:
    built = schedule_start("dualpipe-v", 2, 2, 4).schedule
    assert built is not None
    assert schedule_of_words(*_arguments(built)) == built
    with pytest.raises(ValueError, match="X"):
        schedule_of_words("by hand", 1, (0,), (), [[("X", 0, 0)]])
