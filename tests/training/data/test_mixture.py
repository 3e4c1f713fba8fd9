"""A mixture of sources: shares are exact, phases change at their step, ranks have no part in it."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.core.choices.data_mixture import MIXTURE_PLACES, MixturePart, phases_of, places_of
from echelon.training.data.mixture import Mixture

PARTS = (
    MixturePart(path="a", weight=3, until_step=10),
    MixturePart(path="b", weight=1, until_step=10),
    MixturePart(path="c", weight=0.5),
    MixturePart(path="a", weight=0.5),
)


def test_phases_have_a_weight_for_each_source() -> None:
    found = [(phase.until_step, phase.weights) for phase in phases_of(PARTS)]
    assert found == [(10, (3.0, 1.0, 0.0)), (None, (0.5, 0.0, 0.5))]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0), (0.7, 0.2, 0.1), (1e6, 31.0, 8.0, 0.0)])
def test_places_are_those_of_the_weights_to_one(weights: tuple[float, ...]) -> None:
    places = places_of(weights)
    assert sum(places) == MIXTURE_PLACES
    for weight, count in zip(weights, places, strict=True):
        assert abs(count - MIXTURE_PLACES * weight / sum(weights)) < 1


def test_each_number_of_a_source_comes_once_and_in_order() -> None:
    mixture, seen = Mixture(phases=phases_of(PARTS)), [list[int](), list[int](), list[int]()]
    for step in range(30):
        sources, numbers = mixture.sequences(step=step, count=8)
        for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
            seen[source].append(number)
        counts = np.bincount(sources, minlength=3).tolist()
        assert counts == ([6, 2, 0] if step < 10 else [4, 0, 4])
        given = mixture.given(steps=step + 1, count=8).tolist()
        assert given == [len(numbers) for numbers in seen]
    assert seen == [list(range(len(numbers))) for numbers in seen]


def test_any_stretch_holds_each_source_in_its_share() -> None:
    mixture = Mixture(phases=phases_of([MixturePart(path=p, weight=w) for p, w in WEIGHTS.items()]))
    for step in (0, 1, 77, 4095, 10**9):
        sources, _ = mixture.sequences(step=step, count=1000)
        for source, weight in enumerate(WEIGHTS.values()):
            assert abs(int((sources == source).sum()) - 1000 * weight) <= 2
    assert mixture.most_in_a_step(10).tolist() == [7, 4, 1]


WEIGHTS = {"a": 0.65, "b": 0.3, "c": 0.05}


def test_a_step_far_ahead_follows_from_the_one_before() -> None:
    mixture, far = Mixture(phases=phases_of(PARTS)), 3 * MIXTURE_PLACES
    before = mixture.given(steps=far, count=8)
    sources, numbers = mixture.sequences(step=far, count=8)
    for source in range(3):
        mine = numbers[sources == source].tolist()
        assert mine == list(range(before[source], before[source] + len(mine)))
