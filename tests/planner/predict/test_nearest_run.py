"""The nearest measured run: a plan of a published run is near it, others say how far they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.planner.predict.nearest_run import (
    measured_runs,
    nearest_run,
    num_parameters,
    run_of,
)
from echelon.planner.search.request import make_request
from echelon.planner.search.search import search


def _work(model: str, cluster: str) -> CostInputs:
    best = search(make_request(model, cluster=cluster, pins=["cp=1", "pp=1"])).best
    assert best is not None
    return best.estimate.inputs


@pytest.fixture(scope="module")
def eight_billion() -> CostInputs:
    return _work("llama3-8b", "8xh100")


def test_parameters_are_those_of_the_model(eight_billion: CostInputs) -> None:
    assert num_parameters(eight_billion.model) == pytest.approx(8.03e9, rel=1e-3)


def test_a_model_that_everybody_measures_is_near(eight_billion: CostInputs) -> None:
    found = nearest_run(eight_billion, "megatron-core", "H100")
    assert found.run in measured_runs()
    assert found.run.trainer == "megatron-core"
    assert found.run.device == "H100"
    assert found.differences == ()


def test_a_run_far_away_says_in_what(eight_billion: CostInputs) -> None:
    layout = replace(eight_billion.layout, dp_shard=65536.0, dp_replicate=1.0)
    far = nearest_run(replace(eight_billion, layout=layout), "megatron-core", "H100")
    (only,) = far.differences
    assert only.startswith("with 1/")
    assert only.endswith(" of the devices")
    strange = nearest_run(eight_billion, "no such trainer", "no such device")
    assert strange.differences[:2] == (
        f"by {strange.run.trainer}",
        f"on {strange.run.device}",
    )


def test_a_trainer_that_nobody_knows_is_not_that_of_another_unknown_run(
    eight_billion: CostInputs,
) -> None:
    found = nearest_run(eight_billion, None, "H100")
    assert found.run.device == "H100"
    assert found.differences == (f"by {found.run.trainer}",)


def test_a_plan_is_compared_by_its_own_sizes(eight_billion: CostInputs) -> None:
    one = run_of(eight_billion, "t", "d")
    assert (one.trainer, one.device, one.experts) == ("t", "d", False)
    assert one.parameters == 2.0**33
    assert one.devices == 8.0
