"""One all-reduce by four algorithms: the same sums, and the bytes of each algorithm's formula."""

from __future__ import annotations

import pytest

from echelon.page.lessons.collectives import (
    ALGORITHMS,
    BYTES,
    RANKS,
    all_reduce_algorithms,
    member,
    recorded_collective,
)
from echelon.parallel.transport.algorithms import steps_of
from tests.page.lessons.shown import diagrams, facts, tiles

TOTALS = ("1111", "2222", "3333", "4444")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.system("S58")
def test_every_algorithm_ends_with_the_same_sums_on_all_ranks(algorithm: str) -> None:
    last = tiles(all_reduce_algorithms().scene(algorithm=algorithm).frames[-1])
    for rank in range(RANKS):
        assert tuple(last[f"{rank}.{place}"].label for place in range(RANKS)) == TOTALS
        assert {last[f"{rank}.{place}"].state for place in range(RANKS)} == {"whole"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_and_messages_are_those_of_the_engines_steps(algorithm: str) -> None:
    name = "all-reduce" if algorithm == "ring" else algorithm
    run, frames = recorded_collective(name), all_reduce_algorithms().scene(algorithm=algorithm)
    told = [member(algorithm, rank).bytes(RANKS, BYTES) for rank in range(RANKS)]
    assert list(run.bytes) == told
    last = facts(frames.frames[-1])
    assert last["bytes that ranks have sent"] == ", ".join(map(str, told))
    for rank in range(RANKS):
        steps = steps_of(member(algorithm, rank), RANKS)
        wanted = [(to, part.start, part.length) for one in steps for to, part in one.sends]
        mine = [one for one in run.messages if one.source == rank]
        assert [(one.target, one.start, len(one.values)) for one in mine] == wanted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_sends_what_it_has(algorithm: str) -> None:
    run = recorded_collective("all-reduce" if algorithm == "ring" else algorithm)
    for number, state in enumerate(run.states()[:-1]):
        for one in run.round(number):
            assert tuple(state[one.source][place] for place in one.places) == one.values


def test_nodes_are_boxes_and_few_bytes_leave_them() -> None:
    scene = all_reduce_algorithms().scene(algorithm="hierarchical")
    (board,) = diagrams(scene.frames[0])
    assert [place.group for place in board.places] == ["node 0", "node 0", "node 1", "node 1"]
    assert scene.table is not None
    rows = {row[0]: row for row in scene.table.rows}
    assert rows["hierarchical"][-2:] == ("24 B", "8 B")
    assert rows["ring"][-2] == "24 B"
