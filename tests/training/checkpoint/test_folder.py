"""The checkpoints folder: what is committed, what is left over, what may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import CheckpointError
from echelon.training.checkpoint.folder import (
    CHECKPOINTS,
    checkpoint_path,
    clean_leftovers,
    find_latest,
    list_checkpoints,
    new_temporary,
    prune,
)


def make(directory: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(directory, step).mkdir(parents=True)


def test_committed_checkpoints_come_by_step(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == ()
    make(tmp_path, 10, 2_000_000, 500)
    new_temporary(checkpoint_path(tmp_path, 600)).mkdir()
    (tmp_path / "step-000700").write_text("no folder")
    assert [one.step for one in list_checkpoints(tmp_path)] == [10, 500, 2_000_000]
    assert checkpoint_path(tmp_path, 10).name == "step-000010"


def test_the_newest_is_found_and_a_run_without_one_names_its_neighbours(tmp_path: Path) -> None:
    make(tmp_path / "run" / CHECKPOINTS, 1, 2)
    assert find_latest(tmp_path / "run").step == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as raised:
        find_latest(tmp_path / "empty")
    assert raised.value.rules == ("checkpoint-exists",)
    assert str(tmp_path / "run") in str(raised.value.problems[0].suggestions)


def test_the_oldest_go_and_later_steps_stay(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 9)
    assert prune(tmp_path, newest=4, keep="all") == ()
    gone = prune(tmp_path, newest=4, keep=2)
    assert [path.name for path in gone] == ["step-000001", "step-000002"]
    assert [one.step for one in list_checkpoints(tmp_path)] == [3, 4, 9]
    assert len(list(tmp_path.iterdir())) == 3


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    make(tmp_path, 1)
    left = [new_temporary(checkpoint_path(tmp_path, 2)), tmp_path / ".old-step-000001-0123456789ab"]
    for path in left:
        path.mkdir()
    assert set(clean_leftovers(tmp_path)) == set(left)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
