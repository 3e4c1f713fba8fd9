"""Who may judge whom: ranks with a past in common."""

from __future__ import annotations

import pytest

from echelon.launch.desync.fingerprint import Fingerprint
from echelon.launch.desync.verdict import (
    COMMON_PAST,
    alone,
    are_kin,
    by_number,
    departure,
    left_own_past,
    likely,
    most,
    past_in_common,
)
from tests.launch.desync.programs import PAST, TWO_BY_TWO, one_group, run_of

ONE, OTHER = "dp all_reduce one 1 float32", "dp all_reduce other 1 float32"


def program(rank: int, calls: list[str]) -> dict[int, Fingerprint]:
    """Return the calls of a rank in a group of four by their numbers."""
    return by_number(run_of(rank, calls, one_group(4)))


@pytest.mark.parametrize(
    ("votes", "best"),
    [
        ({}, None),
        ({"a": [0]}, "a"),
        ({"a": [0], "b": [1]}, None),
        ({"a": [0, 1], "b": [2]}, "a"),
        ({"a": [0, 0], "b": [1]}, None),
        ({"a": [0, 1], "b": [2, 3], "c": [4, 5, 6]}, "c"),
    ],
)
def test_most_is_strictly_more(votes: dict[str, list[int]], best: str | None) -> None:
    assert most(votes) == best


def test_a_past_ends_where_calls_differ() -> None:
    mine, theirs = program(0, [ONE, *PAST, ONE]), program(1, [OTHER, *PAST, OTHER])
    assert past_in_common(mine, theirs, 14) == len(PAST)
    assert past_in_common(mine, theirs, 1) == 0
    assert are_kin(mine, theirs, 14)
    assert not are_kin(mine, theirs, COMMON_PAST)
    assert are_kin(program(0, [ONE]), program(1, [OTHER]), 1), "all since the start"


def test_who_leaves_two_others_has_left() -> None:
    ranks = [run_of(rank, [*PAST, OTHER if rank == 2 else ONE], one_group(3)) for rank in range(3)]
    left = departure(ranks)
    assert left is not None
    assert (left.odd, left.others, left.number) == ((2,), (0, 1), len(PAST) + 1)
    assert departure(ranks[1:]) is None, "one against one"
    short = [run_of(rank, [OTHER if rank == 2 else ONE], one_group(3)) for rank in range(3)]
    assert departure(short) is None, "nothing in common before"


def test_programs_that_always_differ_have_not_parted() -> None:
    stages = [[*PAST, ONE, *PAST], [*PAST, ONE, *PAST], [OTHER, *PAST, OTHER, *PAST]]
    ranks = [run_of(rank, calls, one_group(3)) for rank, calls in enumerate(stages)]
    left = departure(ranks)
    # They are one call apart: no call of theirs has the same number.
    assert left is None


def test_of_a_circle_the_one_that_left_its_kin_is_alone() -> None:
    ranks = [run_of(rank, [*PAST, OTHER if rank == 3 else ONE], TWO_BY_TWO) for rank in range(4)]
    left = alone([2, 3], ranks)
    assert left is not None
    assert (left.odd, left.others, left.number) == ((3,), (0,), len(PAST) + 1)
    assert alone([0, 2], [ranks[0], ranks[1], ranks[2]]) is None
    both = [*ranks[:2], run_of(2, [*PAST, OTHER], TWO_BY_TWO), ranks[3]]
    assert alone([2, 3], both) is None


LONG, NEXT = [*PAST, *PAST], "dp all_gather tokens 1 int64"


def test_a_rank_leaves_what_it_did_at_each_like_place_before() -> None:
    after = len(LONG) + 1
    assert left_own_past(program(0, [*LONG, NEXT]), after) is False
    assert left_own_past(program(0, [*LONG, ONE]), after) is True
    assert left_own_past(program(0, [*LONG, ONE]), after + 1) is None, "it has not come there"
    # Once before is no habit, and neither is what changed already.
    assert left_own_past(program(0, [*PAST, ONE]), len(PAST) + 1) is None
    changed = [*LONG, *LONG[:9], OTHER, *LONG]
    assert left_own_past(program(0, [*changed, ONE]), len(changed) + 1) is None


def test_only_one_that_left_its_own_past_beside_others_that_did_not_is_likely() -> None:
    groups, after = one_group(2), len(LONG) + 1

    def of(*calls: str) -> int | None:
        ranks = [run_of(rank, [*LONG, call], groups) for rank, call in enumerate(calls)]
        return likely(dict.fromkeys(range(len(calls)), after), ranks)

    assert of(NEXT, ONE) == 1
    assert of(ONE, NEXT) == 0
    assert of(ONE, OTHER) is None
    assert of(NEXT, NEXT) is None
    short = [run_of(0, [*LONG, ONE], groups), run_of(1, [NEXT], groups)]
    assert likely({0: after, 1: 1}, short) is None, "the past of rank 1 tells nothing"
