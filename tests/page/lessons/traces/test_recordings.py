"""What lessons show as recorded is recorded again by ranks of today, and is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.page.lessons.traces import read_trace
from tests.page.lessons.record import FOLDER, RECORDINGS


@pytest.mark.parametrize("name", ["collectives", "data_parallel"])
@pytest.mark.system("S58")
def test_ranks_record_the_same_again(name: str, rank_pool: RankPool) -> None:
    """Rings and experts are recorded again by the tests of their lessons."""
    again = json.loads(json.dumps(RECORDINGS[name](rank_pool)))
    assert _same(again, read_trace(name)), f"python -m tests.page.lessons.record {name}"


def test_every_recording_is_kept_and_nothing_else() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(RECORDINGS)
    with pytest.raises(FileNotFoundError):
        read_trace("nothing")


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are the same, but for the last digits of numbers."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)
    return ours == theirs


def test_a_difference_is_seen() -> None:
    assert _same({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-15]})
    assert not _same({"a": [1, 2.0]}, {"a": [1, 2.1]})
    assert not _same({"a": [1]}, {"a": [1, 2]})
    assert not _same({"a": 1}, {"b": 1})
