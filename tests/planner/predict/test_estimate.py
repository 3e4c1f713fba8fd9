"""Terms of an estimate add up, rates follow from them, and bands hold them."""

from __future__ import annotations

import pytest

from echelon.planner.predict.estimate import estimate_plan
from tests.handbook.guides.situations import plan_of


def test_rates_follow_from_terms() -> None:
    plan = plan_of("gpt2 8xh100 mesh.dp_replicate=8")
    found = estimate_plan(plan)
    numbers = plan.mathematics
    assert found.tokens == numbers.global_sequences * numbers.sequence_length
    assert found.step_s == pytest.approx(sum(found.seconds.values()))
    assert found.tokens_per_s_per_device == pytest.approx(found.tokens / found.step_s / 8)
    assert 0 < found.mfu < 1
    hour = found.tokens_per_s_per_device * 3600
    assert found.token_price(2.0) == pytest.approx(2.0 / hour * 1e6)


def test_bands_hold_the_numbers() -> None:
    found = estimate_plan(plan_of("gpt2 8xh100 mesh.dp_shard=8 zero.stage=3"))
    low, high = found.step_band
    assert low <= found.step_s <= high
    low, high = found.bytes_band
    assert high - low == pytest.approx(2 * found.bytes["slack"])
    assert (low + high) / 2 == pytest.approx(found.bytes_held)
