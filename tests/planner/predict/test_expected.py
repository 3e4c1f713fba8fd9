"""The expected seconds of a step are made of those of `cost/seconds/interruptions.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.cost.seconds.interruptions import interruptions
from echelon.planner.predict.expected import interruptions_of_run
from echelon.planner.search.ranked import expected_of_request, objective_value
from echelon.planner.search.search import search
from tests.planner.requests import MIXTURE, small


def test_what_is_expected_is_the_step_with_its_interruptions_and_its_risk() -> None:
    request = small(objective="expected")
    one = search(request).first.estimate
    told = expected_of_request(request, one)
    assert told.total_s == objective_value(request, one)
    assert told.total_s == one.step_s * told.slowdown * told.risk + told.retry_s
    assert told.interruptions == interruptions(one.devices, told.checkpoint_bytes)
    assert told.total_s > one.step_s
    tight = replace(request, cluster=request.with_memory(one.bytes_held).cluster)
    risky = expected_of_request(tight, one)
    assert risky.fits < told.fits
    assert risky.total_s > told.total_s
    assert risky.tokens_per_day < told.tokens_per_day


def test_a_checkpoint_has_every_expert_and_a_run_the_tokens_of_those_that_are_met() -> None:
    request = small(settings=MIXTURE, objective="expected")
    one = search(request).first.estimate
    told = expected_of_request(request, one)
    model = request.model
    assert num_active_parameters(model) < num_parameters(model)
    assert told.checkpoint_bytes == num_parameters(model) * request.software.state_bytes
    assert told.steps == pytest.approx(20 * num_active_parameters(model) / one.tokens)


def test_a_run_on_more_devices_is_interrupted_more_often() -> None:
    request = small()
    few, many = (interruptions_of_run(request.model, request.software, n) for n in (8, 64))
    assert few.between_s == pytest.approx(8 * many.between_s)
