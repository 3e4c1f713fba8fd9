"""How near predictions are to what was measured: errors, order, and which runs fit.

The error of a row is predicted / measured - 1, of the seconds of a step or of memory. A sweep is
the rows of one source on one device; a pair of its rows is in the right order when the one with
more tokens per second and device is predicted to have more. Pairs nearer than 1 % are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from bench.accuracy.predict import Prediction
from bench.accuracy.published.rows import Row

TIE = 0.01
Pair = tuple[float, float]
"""A predicted value and the measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Give the errors of some rows, as shares of what was measured, and the order of pairs."""

    rows: int
    mean: float
    median: float
    p90: float
    bias: float
    least: float
    pairs: int
    right_pairs: int

    @property
    def order(self) -> float | None:
        """Return the share of pairs in the right order, or None where there are none."""
        return self.right_pairs / self.pairs if self.pairs else None

    def to_json(self) -> dict[str, object]:
        """Return the errors as a JSON object."""
        known = asdict(self)
        del known["right_pairs"]
        return {**known, "order": self.order}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Count runs that fitted and were said to, and those that did not and were said not to."""

    ran: int
    ran_said: int
    failed: int
    failed_said: int

    def to_json(self) -> dict[str, object]:
        """Return the counts as a JSON object."""
        return {
            "ran": self.ran,
            "ran_and_predicted_to_fit": self.ran_said,
            "out_of_memory": self.failed,
            "out_of_memory_and_predicted_not_to_fit": self.failed_said,
        }


Quantity = Callable[[Prediction], Pair | None]


def step_pair(one: Prediction) -> Pair | None:
    """Return the predicted and the measured seconds of a step."""
    if one.step_s is None or one.case is None or one.case.measured.step_s is None:
        return None
    return one.step_s, one.case.measured.step_s


def rate_pair(one: Prediction) -> Pair | None:
    """Return the predicted and the measured tokens per second and device."""
    if one.tokens_per_s is None or one.case is None or one.case.measured.tokens_per_s is None:
        return None
    return one.tokens_per_s, one.case.measured.tokens_per_s


def memory_pair(one: Prediction) -> Pair | None:
    """Return the predicted and the measured memory of a device."""
    if one.memory_gb is None or one.case is None or one.case.measured.memory_gb is None:
        return None
    return one.memory_gb, one.case.measured.memory_gb


def errors(
    predictions: Iterable[Prediction], of: Quantity, order_by: Quantity | None = None
) -> Errors | None:
    """Return the errors of a quantity, and the order of another, or None where none is known."""
    taken = list(predictions)
    off = np.array([said / real - 1.0 for said, real in filter(None, map(of, taken))])
    if not off.size:
        return None
    size = np.abs(off)
    pairs, right = _order(taken, order_by or of)
    return Errors(
        rows=int(off.size),
        mean=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        bias=float(off.mean()),
        least=float(off.min()),
        pairs=pairs,
        right_pairs=right,
    )


def _order(taken: Sequence[Prediction], of: Quantity) -> tuple[int, int]:
    sweeps: dict[tuple[str, str], list[Pair]] = {}
    for one in taken:
        pair = of(one)
        if pair is not None:
            sweeps.setdefault((one.row.word("source"), one.row.word("gpu")), []).append(pair)
    pairs = right = 0
    for sweep in sweeps.values():
        for (said, real), (other_said, other_real) in combinations(sweep, 2):
            if abs(real - other_real) <= TIE * max(real, other_real):
                continue
            pairs += 1
            right += (said - other_said) * (real - other_real) > 0
    return pairs, right


def fitting(predictions: Iterable[Prediction]) -> Fitting:
    """Count which runs were rightly said to fit, and which rightly not to.

    A row without a result ran out of memory, where others of its source have one.
    """
    taken = [one for one in predictions if one.case is not None and one.fits is not None]
    measured = {
        one.row.word("source") for one in taken if one.case and not one.case.measured.silent
    }
    ran = ran_said = failed = failed_said = 0
    for one in taken:
        if one.case is None:
            continue
        silent = one.case.measured.silent
        if one.case.measured.out_of_memory or (silent and one.row.word("source") in measured):
            failed += 1
            failed_said += not one.fits
        elif not silent:
            ran += 1
            ran_said += bool(one.fits)
    return Fitting(ran=ran, ran_said=ran_said, failed=failed, failed_said=failed_said)


def grouped(
    predictions: Iterable[Prediction], by: Callable[[Row], str]
) -> Mapping[str, Sequence[Prediction]]:
    """Return predictions by the group of their rows, in the order in which groups appear."""
    found: dict[str, list[Prediction]] = {}
    for one in predictions:
        found.setdefault(by(one.row), []).append(one)
    return found
