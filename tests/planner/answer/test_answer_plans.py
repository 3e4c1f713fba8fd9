"""A plan of an answer says how it is split, what it takes, and which devices it leaves idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.answer.answer import EstimatedPlan
from echelon.planner.recommend.recommend import Recommendation, recommend
from tests.planner.requests import small


@pytest.fixture(scope="module", name="one")
def _one() -> EstimatedPlan:
    found = recommend(small(devices=7, pins=["devices=4"]))
    assert isinstance(found, Recommendation)
    first = found.first
    return EstimatedPlan(
        request=found.answer.request,
        ranked=first.ranked,
        preferred_for=("recommended",),
        fits=first.fits,
    )


def test_it_says_how_it_is_split_and_what_it_takes(one: EstimatedPlan) -> None:
    assert str(one).startswith(f"dp{one.plan.mesh.dp_text}")
    told = repr(one)
    assert told.startswith(f"<EstimatedPlan recommended: {one}; ")
    assert f"{one.step_s.value:.4g} s a step" in told
    assert repr(replace(one, preferred_for=())).startswith(f"<EstimatedPlan {one}; ")
    assert (one.devices, one.idle_devices) == (4, 3)
    assert one.plan.mesh.world_size == 4


def test_a_price_gives_that_of_a_million_tokens(one: EstimatedPlan) -> None:
    assert one.price_of_a_million_tokens is None
    priced = replace(one, request=replace(one.request, price=3.6))
    price = priced.price_of_a_million_tokens
    assert price is not None
    # A device costs a thousandth in a second, and makes so many tokens in it.
    assert price.value == pytest.approx(1e6 * 1e-3 / one.tokens_per_s_per_device.value)
    assert price.low < price.value < price.high
