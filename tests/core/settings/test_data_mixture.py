"""Parts of a mixture as phases, and weights as places."""

from __future__ import annotations

from echelon.core.settings.list_types import MixturePart, phases_of, places_of, sources_of

PARTS = (
    MixturePart(path="b", weight=1),
    MixturePart(path="a", weight=3, until_step=20),
    MixturePart(path="b", weight=1, until_step=10),
)


def test_phases_come_in_the_order_of_their_ends_and_sources_as_they_are_named() -> None:
    assert sources_of(PARTS) == ("b", "a")
    found = [(phase.until_step, phase.weights) for phase in phases_of(PARTS)]
    assert found == [(10, (1.0, 0.0)), (20, (0.0, 3.0)), (None, (1.0, 0.0))]


def test_remainders_are_rounded_up_the_largest_first() -> None:
    assert places_of((1.0, 1.0, 1.0)) == (21846, 21845, 21845)
    assert places_of((1.0, 0.0)) == (65536, 0)
