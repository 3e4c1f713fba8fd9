"""Stages that are listed: each block once, in order, and uneven ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ("[[0, 1, 2], [4, 5]]", "blocks 3 are in no stage"),
        ("[[0, 1, 2], [2, 3, 4, 5]]", "blocks 2 are named more than once"),
        ("[[0, 1, 2], [3, 5, 4]]", "block 5 stands where block 4 belongs"),
        ("[[0, 1, 2], [3, 4, 5, 6]]", "blocks 6 do not exist"),
        ("[[-1, 0, 1, 2], [3, 4, 5]]", "blocks -1 do not exist"),
        ("[[], []]", "blocks 0-5 are in no stage"),
    ],
)
def test_explicit_stages_hold_each_block_once_in_order(small: Path, stages: str, says: str) -> None:
    found = problems_of(small, ["mesh.pp=2", f"pipeline.stages={stages}"])
    assert list(found) == ["stages-cover-layers"]
    assert says in found["stages-cover-layers"].message


@pytest.mark.parametrize(
    ("stages", "counts"),
    [("[[0], [1, 2, 3, 4, 5]]", (1, 5)), ("[[0, 1, 2, 3, 4, 5], []]", (6, 0))],
)
def test_explicit_stages_may_be_uneven_or_empty(
    small: Path, stages: str, counts: tuple[int, ...]
) -> None:
    job = load_job(small, ["mesh.pp=2", f"pipeline.stages={stages}"])
    assert tuple(map(len, job.plan.layout.pipeline.stages)) == counts
