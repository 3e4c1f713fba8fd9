# SPDX-License-Identifier: Apache-2.0
"""Numbers as a row of marks, high for large ones: a curve in one line of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

UNICODE = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Marks that fill one to eight eighths of a line."""
ASCII = "_.-=+*%#"
"""Marks for a terminal without those: each has more ink, and stands no lower, than the last."""


def sparkline(values: Sequence[float | None], columns: int, marks: str = UNICODE) -> str:
    """Return values as `columns` marks at most, each the mean of those that follow one another.

    A space stands for what has no value; all values alike are marks of the middle.
    """
    means = [*_means(values, columns)]
    there = [one for one in means if one is not None]
    if not there:
        return ""
    low, high = min(there), max(there)
    span = high - low
    return "".join(" " if one is None else _mark(one - low, span, marks) for one in means)


def _mark(above: float, span: float, marks: str) -> str:
    if not 0 < span < float("inf"):
        return marks[len(marks) // 2]
    return marks[min(int(above / span * len(marks)), len(marks) - 1)]


def _means(values: Sequence[float | None], columns: int) -> list[float | None]:
    count = min(len(values), max(columns, 1))
    found: list[float | None] = []
    for column in range(count):
        begin, end = (len(values) * at // count for at in (column, column + 1))
        there = [one for one in values[begin:end] if one is not None and isfinite(one)]
        found.append(fmean(there) if there else None)
    return found
