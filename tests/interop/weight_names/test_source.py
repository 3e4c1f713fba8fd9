"""Rows of a parameter in a file: in their order, or with rotary pairs side by side."""

from __future__ import annotations

from echelon.interop.weight_names.source import ParameterSource, RotaryPairs


def rows(source: ParameterSource, first: int, count: int) -> dict[int, int]:
    """Return where each row of the parameter is in the file."""
    return {
        run.here + i: run.there + i * run.step
        for run in source.runs(first, count)
        for i in range(run.count)
    }


def test_rows_follow_the_start() -> None:
    source = ParameterSource(key="q", shape=(12, 2), start=4)
    assert rows(source, 1, 3) == {1: 5, 2: 6, 3: 7}


def test_the_halves_of_a_head_are_pairs_in_the_file() -> None:
    # Heads of 2 rows that stay and 4 that turn: x0 x1 y0 y1 here, x0 y0 x1 y1 there.
    source = ParameterSource(key="q", shape=(12, 2), order=RotaryPairs(period=6, start=2))
    head = {0: 0, 1: 1, 2: 2, 3: 4, 4: 3, 5: 5}
    assert rows(source, 0, 12) == head | {6 + here: 6 + there for here, there in head.items()}
    # Any part of the rows is the same part of the whole.
    for first in range(12):
        for count in range(12 - first + 1):
            part = {here: rows(source, 0, 12)[here] for here in range(first, first + count)}
            assert rows(source, first, count) == part
