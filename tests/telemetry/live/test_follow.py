"""A run is followed by what it adds to its file: whole lines, and each of them once."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import ConfigError
from echelon.telemetry.live import ASCII, UNICODE, RunFollower, sparkline
from tests.page.documents.test_run import steps, written
from tests.walks import examples


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    text = steps(4)
    lines = text.splitlines(keepends=True)
    path = written(tmp_path, "")
    file = path / "metrics.jsonl"
    follower = RunFollower(path)
    assert not follower.look()
    assert follower.now().status() == "step 0/300  no step is done yet"
    file.write_text("".join(lines[:3]) + lines[3][:9])
    assert follower.look()
    assert not follower.look()
    now = follower.now()
    assert [step.whole("step") for step in now.steps] == [1, 2]
    assert not now.finished
    assert now.status() == (
        "step 2/4  loss 2.5  tok/s 256.0  eta 0.50s  grad_norm 1  lr 1.0e-3  mem 1.00 MiB"
    )
    file.write_text(text)
    assert follower.look()
    now = follower.now()
    assert now.finished
    assert "step 4/4  loss 1.25" in now.status()
    assert "validation 3.5" in now.status()
    assert now.curves(60, ASCII) == [
        f"loss     {ASCII[-1]}{ASCII[2]}{ASCII[0]}{ASCII[0]}  5 to 1.25",
        f"tok/s    {ASCII[4] * 4}  256.0 to 256.0",
    ]


def test_steps_that_are_taken_again_count_once(tmp_path: Path) -> None:
    again = "".join(steps(4).splitlines(keepends=True)[2:4])
    follower = RunFollower(written(tmp_path, steps(3) + again))
    follower.look()
    assert [step.whole("step") for step in follower.now().steps] == [1, 2, 3]


def test_what_is_no_run_and_what_is_no_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunFollower(tmp_path)
    assert caught.value.rules == ("run-exists",)
    follower = RunFollower(written(tmp_path, "{]\n"))
    with pytest.raises(ConfigError) as caught:
        follower.look()
    assert caught.value.rules == ("events-readable",)


def test_a_run_without_numbers_has_no_curves(tmp_path: Path) -> None:
    text = steps(3, loss=None, step_s=None, grad_norm=None)
    follower = RunFollower(written(tmp_path, text))
    follower.look()
    now = follower.now()
    assert now.curves(60) == []
    assert now.status() == "step 3/3  validation 3.5  lr 1.0e-3  mem 1.00 MiB"


def test_marks_are_as_high_as_their_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 80) == UNICODE
    assert sparkline([7, 6, 5, 4, 3, 2, 1, 0], 80, ASCII) == ASCII[::-1]
    assert len(set(ASCII)) == len(UNICODE)
    assert ASCII.isascii()


def test_more_values_than_columns_are_means() -> None:
    assert sparkline([0, 2, 7, 9], 2, ASCII) == ASCII[0] + ASCII[-1]
    assert sparkline([5.0] * 1000, 10, ASCII) == ASCII[4] * 10


def test_what_has_no_value_is_a_space() -> None:
    assert sparkline([0.0, None, nan, inf, 8.0], 80, ASCII) == f"{ASCII[0]}   {ASCII[-1]}"
    assert sparkline([], 80) == sparkline([None, nan], 80) == ""


@settings(max_examples=examples(40))
@given(st.lists(st.one_of(st.none(), st.floats()), max_size=50), st.integers(-1, 30))
def test_any_values_fit(values: list[float | None], columns: int) -> None:
    assert len(sparkline(values, columns)) <= max(columns, 1)
