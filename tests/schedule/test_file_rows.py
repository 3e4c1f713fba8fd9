"""The words of a schedule file, each in its cell."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.schedule.file_rows import csv_rows, parse_words


def _refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_words(csv_rows(text), "mine.csv")
    return caught.value


@pytest.mark.parametrize(
    ("word", "works"),
    [
        ("D0.1", "F"),
        ("f0.1", "F0.1"),
        ("F0,1", "F"),
        ("F0-1", "F0.1"),
        ("BW0.1.2", "F"),
        ("F0.-1", "F0.1"),
        ("F" + "1" * 9 + "." + "2" * 5000, "F"),
        ("\u0660", "F"),
    ],
)
def test_an_unknown_action_names_its_cell(word: str, works: str) -> None:
    error = _refused(f'rank 0,F0.0,,"{word}",BW0.0')
    assert error.exit_code == 2
    problem = error.problems[0]
    assert problem.rule == "schedule-action-known"
    assert problem.set_by.endswith("mine.csv, row 1, column 4")
    assert problem.suggestions[0] == works or word == "F0,1"
    assert len(problem.message) < 200
    assert problem.message.isascii()


def test_many_unknown_actions_are_counted() -> None:
    error = _refused("\n".join(["X Y"] * 20))
    assert set(error.rules) == {"schedule-action-known"}
    assert error.problems[-1].message == "and 32 more of the same kind"
