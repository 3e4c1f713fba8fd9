"""A search takes how gradients are summed from its run, for the plans that sum any."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, EchelonError
from echelon.planner.search.formulas import searched_sums
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


def test_what_nobody_says_is_assumed_and_told() -> None:
    request = make_request("llama2-7b", cluster="8xv100-32gb")
    numbers = request.mathematics
    assert numbers.precision.parameters == "fp16"
    assert numbers.precision.loss_scaling == "dynamic"
    assert any("fp16" in text for text in request.defaults_taken)
    own = make_request("nano", cluster="8xh100", settings=["precision.parameters=bf16"])
    assert own.defaults_taken == ()
    assert (own.mathematics.global_sequences, own.mathematics.sequence_length) == (16, 128)


@pytest.mark.parametrize(
    ("setting", "works"),
    [
        ("local_sgd.every = 4", "local_sgd.every = 0"),
        ("servers.count = 2", "servers.count = 0"),
        ('servers.updates = "asynchronous"', 'servers.updates = "synchronous"'),
    ],
)
def test_what_another_number_of_ranks_would_change(
    setting: str, works: str, tmp_path: Path
) -> None:
    run, (key, value) = tmp_path / "run.toml", setting.split(" = ")
    table, _, name = key.partition(".")
    run.write_text(f'extends = "nano"\n[{table}]\n{name} = {value}\n')
    for model, typed in (("nano", [setting.replace(" ", "").replace('"', "")]), (run, [])):
        with pytest.raises(ConfigError) as caught:
            make_request(model, cluster="8xh100", settings=typed)
        (problem,) = caught.value.problems
        assert (problem.rule, problem.key) == ("search-splits-one-training", key)
        assert problem.message.startswith(f"{setting}, and ")
        assert problem.suggestions[0] == works
        assert problem.set_by
    run.write_text(f'extends = "nano"\n[{table}]\n{works.partition(".")[2]}\n')
    assert make_request(run, cluster="8xh100").cluster.name == "8xh100"
