"""The eighths of the slow tests."""

from __future__ import annotations

import pytest

from tests.slow_eighth import PARTS, head, part_of_commit, split


def test_parts_follow_the_names_and_take_about_as_long() -> None:
    seconds = {f"tests/test_{number:03d}.py": 1.0 + number % 7 for number in range(400)}
    parts = split(seconds)
    assert [parts[file] for file in sorted(seconds)] == sorted(parts.values())
    assert {*parts.values()} == {*range(1, PARTS + 1)}
    spent = [sum(seconds[f] for f in seconds if parts[f] == part) for part in {*parts.values()}]
    assert max(spent) - min(spent) <= 2 * max(seconds.values())


def test_a_file_that_is_longer_than_a_part_is_in_one() -> None:
    assert split({"a": 100.0, "b": 1.0, "c": 1.0}) == {"a": 4, "b": 8, "c": 8}
    assert split({}) == {}


@pytest.mark.parametrize(("commit", "part"), [("0", 1), ("a7", 8), ("f" * 39 + "0", 1)])
def test_the_hash_of_a_commit_chooses(commit: str, part: int) -> None:
    assert part_of_commit(commit) == part
    assert 1 <= part_of_commit(head()) <= PARTS
