"""Round times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.time_axis import ticks


@pytest.mark.parametrize(
    ("span", "unit", "labels", "name"),
    [
        (33.0, "slots", ["0", "5", "10", "15", "20", "25", "30"], "slots"),
        (10.0, "s", [str(n) for n in range(11)], "s"),
        (0.004, "s", ["0", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4"], "ms"),
        (0.0, "s", ["0"], "s"),
        (3e-7, "s", ["0", "50", "100", "150", "200", "250", "300"], "ns"),
    ],
)
def test_a_span_has_these_labels(span: float, unit: str, labels: list[str], name: str) -> None:
    scale, found, scaled = ticks(span, unit)
    assert ([f"{tick * scale:.6g}" for tick in found], scaled) == (labels, name)


@given(st.floats(1e-8, 1e8))
def test_ticks_are_few_and_within_the_span(span: float) -> None:
    _, found, _ = ticks(span, "s")
    assert found[0] == 0
    assert 2 <= len(found) <= 14
    assert found[-1] <= span * (1 + 1e-6)
    assert span - found[-1] < found[1] * (1 + 1e-6)
