"""A search takes how gradients are summed from its run, for the plans that sum any."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError, EchelonError
from echelon.planner.predict.formulas import searched_sums
from echelon.planner.search.request import SearchAim, make_request
from echelon.planner.search.search import search

RING = "collectives.algorithm=ring"
PIN = ("dp_shard=1", "cp=1")


def test_plans_that_sum_do_so_as_the_run_says() -> None:
    request = make_request(
        "nano", cluster="4xcpu", settings=[RING], pins=PIN, aim=SearchAim(top=20)
    )
    found = [one.plan for one in search(request).ranked]
    plans = [plan for plan in found if plan is not None]
    for plan in plans:
        share = plan.mesh.dp_replicate > 1 or plan.mesh.tp > 1
        share |= plan.model.tied and plan.mesh.pp > 1
        assert plan.layout.collectives.algorithm == ("ring" if share else "backend")
    plain = make_request("nano", cluster="4xcpu", pins=PIN)
    assert searched_sums(request) != searched_sums(plain)


@pytest.mark.parametrize(
    ("cluster", "aim", "rule", "said"),
    [
        ("8xh100", SearchAim(), "own-sums-need-gloo", "communicates over NCCL"),
        ("4xcpu", SearchAim(trainer="megatron-core"), "no-effect", "of our own trainer"),
    ],
)
def test_what_no_plan_can_do_is_refused_with_its_reason(
    cluster: str, aim: SearchAim, rule: str, said: str
) -> None:
    with pytest.raises(EchelonError) as refused:
        make_request("nano", cluster=cluster, settings=[RING], aim=aim)
    assert refused.value.rules == (rule,)
    assert said in str(refused.value)


def test_other_problems_of_a_plan_are_still_told() -> None:
    request = make_request(
        "nano", cluster="4xcpu", settings=["collectives.algorithm=halving-doubling"]
    )
    with pytest.raises(ConfigError) as refused:
        request.job({"mesh.dp_replicate": 3})
    assert "halving-needs-power-of-two" in refused.value.rules
    assert request.job({"mesh.tp": 2}).plan.layout.collectives.algorithm == "halving-doubling"
    assert request.job({}).plan.layout.collectives.algorithm == "backend"
