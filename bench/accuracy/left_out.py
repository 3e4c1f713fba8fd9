"""Predict every group of rows with constants that were fitted without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.accuracy.groups import is_complete, publisher_of
from bench.accuracy.predict import Adjust, Case, Prediction, predict_cases
from bench.accuracy.published.rows import Row

Refit = Callable[[Sequence[Case]], Adjust]
"""Fits constants to cases; what it returns puts these constants in the place of any cases' own."""

LEAVE_OUT: dict[str, Callable[[Row], str]] = {
    "source": lambda row: row.word("source"),
    "publisher": publisher_of,
    "device": lambda row: row.word("gpu"),
    "framework": lambda row: row.word("framework"),
}
"""What can be left out at once: a source (one table), all of a publisher, of a device, ..."""


def predict_left_out(
    cases: Sequence[Case], refit: Refit, by: Callable[[Row], str]
) -> list[Prediction]:
    """Return a prediction for each case, in order, by constants fitted to all other groups."""
    groups = dict.fromkeys(by(case.row) for case in cases)
    found: dict[int, Prediction] = {}
    for group in groups:
        inside = [index for index, case in enumerate(cases) if by(case.row) == group]
        outside = [
            case
            for case in cases
            if by(case.row) != group and is_complete(case.row) and case.measured.step_s
        ]
        adjust = refit(outside)
        predicted = predict_cases(adjust([cases[index] for index in inside]))
        found |= dict(zip(inside, predicted, strict=True))
    return [found[index] for index in range(len(cases))]
