"""A missing sum is told with the axis over which copies make the right gradient."""

from __future__ import annotations

import math

import torch

from echelon.proof.causes.gradients.gradients import missing_sums

AXES = [("dp", ((0, 1), (2, 3))), ("tp", ((0, 2), (1, 3)))]
RIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
PART = torch.tensor([0.25, 1.5, -1.0, 3.0], dtype=torch.float64)


def told(*copies: torch.Tensor) -> list[tuple[str, str]]:
    """Return the axis and the sentence of each sum that fits."""
    found = missing_sums(AXES, dict(enumerate(copies)), RIGHT, 1e-6)
    return [(one.axis, one.description) for one in found]


def test_copies_that_add_up_are_not_reduced() -> None:
    says = "copies differ along tp and add up to the right one: they are not reduced over tp"
    assert told(PART, PART, RIGHT - PART, RIGHT - PART) == [("tp", says)]


def test_a_mean_is_a_sum_too() -> None:
    ((axis, says),) = told(PART, 2 * RIGHT - PART)
    assert (axis, says.split(" the right")[0]) == (
        "dp",
        "copies differ along dp and have as their mean",
    )


def test_rows_that_are_alike_are_not_summed() -> None:
    some = torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=torch.float64)
    other = torch.tensor([1.0, 2.0, 4.0, 1.0], dtype=torch.float64)
    ((axis, says),) = told(some, other)
    assert axis == "dp"
    assert says.startswith("copies differ along dp in some rows and add up to the right one")


def test_copies_are_compared_where_all_have_them() -> None:
    held = PART.clone()
    held[3] = math.nan
    assert [axis for axis, _ in told(held, RIGHT - PART)] == ["dp"]
    assert told(PART, PART, PART, PART) == []
    assert told(PART) == []
