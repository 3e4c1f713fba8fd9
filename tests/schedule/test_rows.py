"""The words of a schedule file, each in its cell."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given

from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.schedule.action import Action, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.rows import csv_rows, parse_words, schedule_from_actions
from tests.schedule.examples import SEEDS, listed
from tests.schedule.mutations import MUTATIONS, is_valid


def _refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_words(csv_rows(text), "mine.csv")
    return caught.value


@pytest.mark.parametrize(
    ("word", "works"),
    [
        ("D0.1", "F"),
        ("f0.1", "F0.1"),
        ("F0,1", "F"),
        ("F0-1", "F0.1"),
        ("BW0.1.2", "F"),
        ("F0.-1", "F0.1"),
        ("F" + "1" * 9 + "." + "2" * 5000, "F"),
        ("\u0660", "F"),
    ],
)
def test_an_unknown_action_names_its_cell(word: str, works: str) -> None:
    error = _refused(f'rank 0,F0.0,,"{word}",BW0.0')
    assert error.exit_code == 2
    problem = error.problems[0]
    assert problem.rule == "schedule-action-known"
    assert problem.set_by.endswith("mine.csv, row 1, column 4")
    assert problem.suggestions[0] == works or word == "F0,1"
    assert len(problem.message) < 200
    assert problem.message.isascii()


def test_many_unknown_actions_are_counted() -> None:
    error = _refused("\n".join(["X Y"] * 20))
    assert set(error.rules) == {"schedule-action-known"}
    assert error.problems[-1].message == "and 32 more of the same kind"


@given(SEEDS)
def test_rows_are_accepted_exactly_where_some_placement_runs(seed: int) -> None:
    rng = random.Random(seed)
    schedule = listed(rng.randrange(2**32), mirrors=rng.random() < 0.5)
    rows = [list(row) for row in schedule.actions]
    for _ in range(rng.randint(0, 1)):
        rng.choice(MUTATIONS)(rows, rng)
    try:
        check_schedule(schedule_from_actions("random", rows))
        accepted = True
    except InfeasiblePlan:
        accepted = False
    actions = tuple(tuple(row) for row in rows)
    assert accepted is _runs_somehow(actions, schedule.num_ranks)


def _runs_somehow(actions: tuple[tuple[Action, ...], ...], num_ranks: int) -> bool:
    """Try every way of mirroring microbatches; the owner of a stage is where it then stands."""
    every = [(rank, action) for rank, row in enumerate(actions) for action in row]
    microbatches = 1 + max((action.microbatch for _, action in every), default=0)
    stages = 1 + max((action.stage for _, action in every), default=0)
    for bits in product((False, True), repeat=microbatches):
        owner: dict[int, int] = {}
        for rank, action in every:
            seen = num_ranks - 1 - rank if bits[action.microbatch] else rank
            owner.setdefault(action.stage, seen)
        schedule = Schedule(
            name="tried",
            num_ranks=num_ranks,
            num_microbatches=microbatches,
            stage_ranks=tuple(owner.get(stage, 0) for stage in range(stages)),
            mirrored=tuple(m for m, bit in enumerate(bits) if bit),
            actions=actions,
        )
        if is_valid(schedule):
            return True
    return False


def test_an_action_astray_is_the_odd_one() -> None:
    schedule = build_schedule("1f1b", num_stages=2, num_ranks=2, num_microbatches=3)
    rows = [list(row) for row in schedule.actions]
    rows[0].append(rows[1].pop(0))
    found = schedule_from_actions("astray", rows)
    assert (found.stage_ranks, found.mirrored) == ((0, 1), ())


def test_the_first_microbatch_is_not_the_mirrored_one() -> None:
    schedule = build_schedule("dualpipe", num_stages=4, num_ranks=4, num_microbatches=8)
    assert schedule_from_actions("dualpipe", schedule.actions) == schedule


def test_rows_without_an_action_are_still_ranks() -> None:
    found = schedule_from_actions("empty", [(), ()])
    assert (found.num_ranks, found.num_stages, found.num_microbatches) == (2, 0, 0)
