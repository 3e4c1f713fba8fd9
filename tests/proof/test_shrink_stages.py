"""Few blocks for each stage, with the order between stages, and several of them where it shows."""

from __future__ import annotations

import pytest

from echelon.proof.shrink_stages import shrink_stages, stages_of


@pytest.mark.parametrize(
    ("counts", "small"),
    [
        ((6,), (2,)),
        ((1,), (1,)),
        ((4, 4), (2, 2)),
        ((4, 2), (3, 2)),
        ((3, 3, 3, 3), (1, 2, 1, 1)),
        ((1, 1, 1), (1, 1, 1)),
        ((8, 9, 9, 6), (2, 3, 3, 1)),
        ((0, 2, 2, 1), (0, 2, 2, 1)),
        ((0, 0, 0, 2), (0, 0, 0, 2)),
    ],
)
def test_uneven_stages_stay_uneven(counts: tuple[int, ...], small: tuple[int, ...]) -> None:
    shrunk = shrink_stages(stages_of(counts))
    assert tuple(len(stage) for stage in shrunk) == small
    assert [block for stage in shrunk for block in stage] == list(range(sum(small)))


def test_a_stage_of_many_has_blocks_of_two_units() -> None:
    shrunk = shrink_stages(stages_of((8, 8, 8, 8)), unit=2)
    assert [len(stage) for stage in shrunk] == [1, 3, 1, 1]


@pytest.mark.parametrize(
    ("counts", "small"),
    [
        ((32,), (11,)),
        ((16, 16), (6, 6)),
        ((8, 8, 8, 8), (3, 4, 3, 3)),
        ((4, 4), (4, 4)),
        ((2, 30), (2, 9)),
    ],
)
def test_as_many_blocks_as_are_asked_for(counts: tuple[int, ...], small: tuple[int, ...]) -> None:
    shrunk = shrink_stages(stages_of(counts), least=11)
    assert tuple(len(stage) for stage in shrunk) == small
