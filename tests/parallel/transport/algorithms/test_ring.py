"""The ring: 2 (n-1) steps, and the owner of each sum after the first phase."""

from __future__ import annotations

import pytest

from echelon.parallel.transport.algorithms import Part, gather_phase, scatter_phase
from tests.parallel.transport.algorithms.targets import num_steps, summed_here


@pytest.mark.system("S09")
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_each_member_owns_one_sum_after_phase_1_and_has_all_after_phase_2(size: int) -> None:
    whole, places = Part(0, 3 * size + 2), range(size)
    parts = [[10**one] * whole.length for one in places]
    total = sum(10**one for one in places)
    phase_1 = summed_here(parts, [scatter_phase(places, one, whole.chunks(size)) for one in places])
    for one in places:
        owned = whole.chunk(one + 1, size)
        complete = [place for place, value in enumerate(phase_1[one]) if value == total]
        assert complete == list(range(owned.start, owned.stop))
    phase_2 = [gather_phase(places, one, whole.chunks(size)) for one in places]
    assert summed_here(phase_1, phase_2) == [[total] * whole.length] * size
    assert num_steps("ring", size, size) == 2 * (size - 1)
    assert len(phase_2[0]) == size - 1


def test_phase_2_without_its_last_chunk_leaves_each_member_a_part_of_a_sum() -> None:
    size = 4
    whole, places = Part(0, 12), range(size)
    plans = [
        (
            *scatter_phase(places, one, whole.chunks(size)),
            *gather_phase(places, one, whole.chunks(size))[:-1],
        )
        for one in places
    ]
    sums = summed_here([[1] * 12 for _ in places], plans)
    assert all(sorted(set(one)) != [size] for one in sums)


@pytest.mark.parametrize("size", [2, 4])
def test_only_the_neighbours_are_spoken_to(size: int) -> None:
    for one in range(size):
        steps = scatter_phase(range(size), one, Part(0, 8).chunks(size))
        assert {other for step in steps for other, _ in step.sends} == {(one + 1) % size}
