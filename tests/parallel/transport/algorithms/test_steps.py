"""The steps of every algorithm, run without ranks: sums, bytes and numbers of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.transport.algorithms.steps import Part, num_sent, steps_of
from tests.parallel.transport.algorithms.targets import groups_of, summed_here, sums_of


@pytest.mark.system("S09")
@given(size=st.integers(2, 12), count=st.integers(0, 60), seed=st.integers(0, 99))
def test_every_member_gets_the_sum_and_sends_the_bytes_of_the_formula(
    size: int, count: int, seed: int
) -> None:
    parts = [[seed + one * 1000 + place for place in range(count)] for one in range(size)]
    total = [sum(column) for column in zip(*parts, strict=True)]
    for algorithm, each in groups_of(size):
        members = [sums_of(algorithm, one, size, each) for one in range(size)]
        plans = [steps_of(member, count) for member in members]
        assert summed_here(parts, plans) == [total] * size
        for one, (member, steps) in enumerate(zip(members, plans, strict=True)):
            near, far = member.bytes_by_tier(count, 1)
            assert near + far == num_sent(steps)
            beyond = [
                part.length
                for step in steps
                for other, part in step.sends
                if member.nodes[other] != member.nodes[one]
            ]
            assert far == sum(beyond)


@given(size=st.integers(2, 12), count=st.integers(0, 60))
def test_what_arrives_to_be_added_is_that_of_the_formula(size: int, count: int) -> None:
    for algorithm, each in groups_of(size):
        members = [sums_of(algorithm, one, size, each) for one in range(size)]
        arriving = [
            max(
                (
                    sum(part.length for _, part in step.receives)
                    for step in steps_of(member, count)
                    if step.adds
                ),
                default=0,
            )
            for member in members
        ]
        assert [one.arriving_elements(count) for one in members] == arriving
        assert members[0].most_arriving_elements(count) == max(arriving)


def test_chunks_cover_a_part_and_differ_by_one_element_at_most() -> None:
    chunks = [Part(3, 14).chunk(index, 4) for index in range(4)]
    assert [(one.start, one.stop) for one in chunks] == [(3, 5), (5, 8), (8, 11), (11, 14)]
    assert Part(3, 14).chunk(-1, 4) == chunks[3]
