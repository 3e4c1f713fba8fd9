"""Closed forms of pipelines: the published ones, by hand, for numbers and for arrays of plans."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.cost.inputs.numbers import LayoutNumbers
from echelon.cost.inputs.pipeline import (
    bubble_seconds,
    crosses_itself,
    has_both_ends,
    microbatches_in_flight,
    microbatches_that_wait,
    schedule_index,
)
from echelon.schedule.build import SCHEDULES

# For p = 4, m = 8 and F, B, W = 2, 3, 1: idle seconds, in flight, waiting for W.
EXPECTED = {
    "naive": (1, 3 * 8 * 6, 1, 0),
    "gpipe": (1, 3 * 6, 8, 0),
    "1f1b": (1, 3 * 6, 4, 0),
    "interleaved-1f1b": (2, 3 * 6 / 2, 5.5, 0),
    "breadth-first": (2, 3 * 6 / 2, 8, 0),
    "zb-h1": (1, 3 * (2 + 3 - 1), 4, 4),
    "zb-h2": (1, 3 * (2 + 3 - 2), 7, 7),
    "zb-v": (2, 3 * 2 / 2, 4, 4),
    "dualpipe": (2, 2 + 3 - 1, 5, 2),
    "dualpipe-v": (2, 3 * (2 + 3 - 1) / 2, 5, 2),
}


def _layout(name: str, **changes: float) -> LayoutNumbers:
    numbers = {"pp": 4.0, "microbatches": 8.0, "virtual": float(EXPECTED[name][0]), **changes}
    return LayoutNumbers(schedule=schedule_index(name), **numbers)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_forms_of_each_schedule(name: str) -> None:
    layout, (_, idle, held, waiting) = _layout(name), EXPECTED[name]
    assert bubble_seconds(layout, 2.0, 3.0, 1.0) == pytest.approx(idle)
    assert microbatches_in_flight(layout) == held
    assert microbatches_that_wait(layout) == waiting
    # One rank waits for nobody, and a step holds no more microbatches than it has.
    assert bubble_seconds(_layout(name, pp=1.0), 2.0, 3.0, 1.0) == 0
    assert microbatches_in_flight(_layout(name, microbatches=1.0)) == 1


def test_arrays_are_plans_one_by_one() -> None:
    names = list(EXPECTED)
    many = LayoutNumbers(
        pp=4.0,
        microbatches=8.0,
        virtual=np.array([float(EXPECTED[name][0]) for name in names]),
        schedule=np.array([schedule_index(name) for name in names]),
    )
    idle = np.asarray(bubble_seconds(many, 2.0, 3.0, 1.0))
    assert idle.tolist() == pytest.approx([EXPECTED[name][1] for name in names])
    held = np.asarray(microbatches_in_flight(many))
    assert held.tolist() == [EXPECTED[name][2] for name in names]


def test_who_holds_both_ends_and_two_copies() -> None:
    assert {name for name in SCHEDULES if crosses_itself(_layout(name))} == {"dualpipe"}
    assert {name for name in SCHEDULES if has_both_ends(_layout(name))} == {"zb-v", "dualpipe-v"}
    assert not crosses_itself(_layout("dualpipe", pp=1.0))


def test_schedules_without_a_builder_borrow_closed_forms() -> None:
    assert schedule_index("auto") == schedule_index("zb-h1")
    assert schedule_index("file") == schedule_index("1f1b")
    with pytest.raises(ValueError, match="not in list"):
        schedule_index("unknown")
