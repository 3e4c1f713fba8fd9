"""The steps of every algorithm, run without ranks: sums, bytes and numbers of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.transport.algorithms import (
    Part,
    gather_steps_of,
    scatter_steps_of,
    steps_of,
)
from tests.parallel.transport.algorithms.targets import groups_of, summed_here, sums_of, tiers_sent


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
        for member, steps in zip(members, plans, strict=True):
            assert sum(member.bytes_by_tier(count, 1)) == sum(
                part.length for step in steps for _, part in step.sends
            )
            assert member.bytes_by_tier(count, 1) == tiers_sent(steps, member)


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


@pytest.mark.system("S09")
@given(size=st.integers(2, 12), length=st.integers(0, 9), seed=st.integers(0, 99))
def test_every_member_gets_its_slice_of_the_sum_and_all_slices_are_gathered(
    size: int, length: int, seed: int
) -> None:
    count = size * length
    whole, places = Part(0, count), range(size)
    parts = [[seed + one * 1000 + place for place in range(count)] for one in places]
    total = [sum(column) for column in zip(*parts, strict=True)]
    for algorithm, each in groups_of(size):
        members = [sums_of(algorithm, one, size, each) for one in places]
        if not members[0].scatters:
            continue
        scatters = [scatter_steps_of(member, count) for member in members]
        gathers = [gather_steps_of(member, count) for member in members]
        summed = summed_here(parts, scatters)
        own = [whole.chunk(one, size) for one in places]
        for found, part in zip(summed, own, strict=True):
            assert found[part.start : part.stop] == total[part.start : part.stop]
        # What a member has of other slices must not matter to a gather.
        alone = [
            [x if part.start <= at < part.stop else -1 for at, x in enumerate(total)]
            for part in own
        ]
        assert summed_here(alone, gathers) == [total] * size
        for one, member in enumerate(members):
            for steps in (scatters[one], gathers[one]):
                assert tiers_sent(steps, member) == member.slice_bytes_by_tier(length)


def test_chunks_cover_a_part_and_differ_by_one_element_at_most() -> None:
    chunks = [Part(3, 14).chunk(index, 4) for index in range(4)]
    assert [(one.start, one.stop) for one in chunks] == [(3, 5), (5, 8), (8, 11), (11, 14)]
    assert Part(3, 14).chunk(-1, 4) == chunks[3]
