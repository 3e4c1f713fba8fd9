"""Recorded messages explain what each rank had, and are the steps of the engine's algorithms."""

from __future__ import annotations

import pytest

from echelon.cost.bytes.all_reduce import SumGroup
from echelon.page.lessons.collectives import (
    ALL_TO_ALL,
    BYTES,
    NAMES,
    RANKS,
    bytes_by_formula,
    recorded_collective,
)
from echelon.parallel.transport.algorithms import gather_steps_of, scatter_steps_of, steps_of

MAKERS = {
    "all-reduce": steps_of,
    "all-gather": gather_steps_of,
    "reduce-scatter": scatter_steps_of,
}


@pytest.mark.parametrize("name", NAMES)
def test_messages_lead_from_what_was_given_to_what_was_got(name: str) -> None:
    run = recorded_collective(name)
    assert run.num_ranks == RANKS
    if name == ALL_TO_ALL:
        assert run.got == tuple(zip(*run.given, strict=True))
        sent = {(one.source, one.target): one.values[0] for one in run.messages}
        pairs = [(i, j) for i in range(RANKS) for j in range(RANKS) if i != j]
        assert sent == {(i, j): run.given[i][j] for i, j in pairs}
        return
    states = run.states()
    for number, state in enumerate(states[:-1]):
        for one in run.round(number):
            has = tuple(state[one.source][place] for place in one.places)
            assert has == one.values, "a rank sends what it has"
    for rank, last in enumerate(states[-1]):
        if name == "reduce-scatter":
            assert run.got[rank] == (last[rank],)
        else:
            assert run.got[rank] == tuple(last[place] for place in range(RANKS))
    totals = tuple(map(sum, zip(*run.given, strict=True)))
    expected = {
        "all-reduce": (totals,) * RANKS,
        "reduce-scatter": tuple((one,) for one in totals),
        "all-gather": (tuple(one[0] for one in run.given),) * RANKS,
    }
    assert run.got == expected[name]


@pytest.mark.parametrize("name", list(MAKERS))
def test_messages_are_the_steps_of_the_ring(name: str) -> None:
    run = recorded_collective(name)
    for rank in range(RANKS):
        sums = SumGroup(algorithm="ring", place=rank, nodes=(0,) * RANKS)
        wanted = [
            (number, to, part.start, step.adds)
            for number, step in enumerate(MAKERS[name](sums, RANKS))
            for to, part in step.sends
        ]
        mine = [one for one in run.messages if one.source == rank]
        assert [(one.round, one.target, one.start, one.adds) for one in mine] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_recorded_and_those_of_the_formula(name: str) -> None:
    run = recorded_collective(name)
    assert run.bytes == (bytes_by_formula(name),) * RANKS
    for rank in range(RANKS):
        assert sum(BYTES for one in run.messages if one.source == rank) == run.bytes[rank]
