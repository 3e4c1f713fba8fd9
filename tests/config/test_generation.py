"""What a trained model may be asked to write, and how ranks may split it for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.config.generation import Request, Sampling, generation_plan, require_request
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.updates import Updates
from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.experts import Balance
from echelon.core.plan import Plan
from tests.parallel.layouts import DEEPSEEK, GPT2, MIXTRAL, NANO, plan_of

TRAINED = plan_of(model=NANO, dp=2, pp=2, tp=2, sequence_parallel=True, dtype="fp32")


def refused(trained: Plan, *settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        generation_plan(trained, settings)
    return caught.value


def test_without_settings_one_rank_writes() -> None:
    plan = generation_plan(TRAINED, ())
    assert plan.mesh.world_size == 1
    assert plan.model == TRAINED.model
    assert not plan.layout.sequence_parallel


def test_ranks_are_those_that_are_asked_for() -> None:
    plan = generation_plan(TRAINED, ["mesh.tp=2", "mesh.pp=3", "mesh.dp_replicate=2"])
    assert plan.mesh.world_size == 12
    assert plan.layout.pipeline.stages == ((0, 1), (2,), (3,))
    assert plan.cluster.num_devices >= 12


def test_experts_are_shared_out_over_tensor_ranks() -> None:
    moe = plan_of(model=MIXTRAL)
    assert generation_plan(moe, ["mesh.tp=2"]).mesh.ep == 2
    pieces = generation_plan(moe, ["mesh.tp=2", "experts.expert_tp=2"])
    assert (pieces.mesh.ep, pieces.layout.experts.expert_tp) == (1, 2)
    error = refused(plan_of(model=replace(DEEPSEEK, kv_heads=4)), "mesh.tp=4", "mesh.ep=2")
    assert "generate-experts" in error.rules


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("mesh.cp=2", "generate-settings"),
        ("mesh.dp_shard=2", "generate-settings"),
        ("zero.stage=3", "generate-settings"),
        ("mesh.sequence_parallel=true", "generate-settings"),
        ("mesh.tpp=2", "unknown-key"),
        ("mesh.tp=two", "wrong-type"),
        ("mesh.tp=4", "tp-divides-kv-heads"),
        ("mesh.pp=5", "layers-fill-stages"),
        ("mesh.ep=2", "generate-experts"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_its_rule(setting: str, rule: str) -> None:
    model = replace(MIXTRAL, layers=4) if "ep" in setting else NANO
    error = refused(replace_model(model), setting)
    assert rule in error.rules
    problem = next(one for one in error.problems if one.rule == rule)
    assert f"--set {setting}" in problem.set_by


def replace_model(model: Any) -> Plan:
    return plan_of(model=model)


@pytest.mark.parametrize(
    "numbers",
    [
        {"balance": Balance(kind="aux", aux_over="sequence", capacity_factor=1.0, drop="score")},
        {"updates": Updates(kind="asynchronous")},
        {"local_sgd": LocalSgd(every=10, islands=2)},
    ],
    ids=["capacity", "servers", "islands"],
)
def test_rules_of_training_are_not_asked_of_a_text(numbers: dict[str, Any]) -> None:
    """A capacity-holds-tokens of one token, or a rule about replicas, says nothing of a text."""
    trained = plan_of(model=MIXTRAL)
    trained = replace(trained, mathematics=replace(trained.mathematics, **numbers))
    for settings in ([], ["mesh.tp=2"], ["mesh.pp=2", "mesh.dp_replicate=3"]):
        balance = generation_plan(trained, settings).mathematics.balance
        assert balance.capacity(1, 8, 2) is None


def test_where_tokens_go_stays() -> None:
    trained = plan_of(model=MIXTRAL, balance=Balance(route="not-last", capacity_factor=2.0))
    assert generation_plan(trained, ()).mathematics.balance == Balance(route="not-last")


def test_a_model_that_looks_ahead_cannot_write() -> None:
    both = plan_of(model=replace(NANO, causal=False))
    with pytest.raises(InfeasiblePlan) as caught:
        generation_plan(both, ())
    assert "generate-causal" in caught.value.rules


def request_problem(request: Request, prompts: list[int], dp: int = 1) -> tuple[str, str, str]:
    plan = generation_plan(plan_of(model=GPT2), [f"mesh.dp_replicate={dp}"])
    with pytest.raises(ConfigError) as caught:
        require_request(plan, request, prompts)
    (problem,) = caught.value.problems
    return problem.rule, problem.message, " ".join(problem.suggestions)


def test_prompts_have_tokens_and_every_replica_has_a_prompt() -> None:
    request = Request(max_tokens=3)
    assert request_problem(request, [])[0] == "generate-has-prompt"
    assert request_problem(request, [2, 0])[:2] == ("generate-has-prompt", "prompt 1 has no token")
    rule, message, works = request_problem(request, [2, 2], dp=4)
    assert rule == "generate-shares-prompts"
    assert "2 < 4" in message
    assert works == "1 2"


def test_the_last_token_needs_no_position() -> None:
    plan = generation_plan(plan_of(model=GPT2), ())
    require_request(plan, Request(max_tokens=13), [4])
    rule, message, works = request_problem(Request(max_tokens=14), [4])
    assert rule == "generate-fits-positions"
    assert "4 + 14 - 1 = 17 positions, but gpt2 has 16" in message
    assert works == "--max-tokens 13"
    assert request_problem(Request(max_tokens=1), [40])[2] == "a prompt of at most 16 tokens"


@pytest.mark.parametrize(
    "wrong",
    [
        Request(max_tokens=0),
        Request(block_tokens=0, max_tokens=1),
        Request(max_tokens=1, sampling=Sampling(temperature=-1.0)),
        Request(max_tokens=1, sampling=Sampling(temperature=float("nan"))),
        Request(max_tokens=1, sampling=Sampling(temperature=1.0, top_k=0)),
        Request(max_tokens=1, sampling=Sampling(temperature=1.0, top_p=1.5)),
        Request(max_tokens=1, sampling=Sampling(top_k=3)),
        Request(max_tokens=1, sampling=Sampling(top_p=0.5)),
    ],
)
def test_numbers_of_a_draw_have_limits_and_an_effect(wrong: Request) -> None:
    assert request_problem(wrong, [2])[0] == "generate-sampling"
