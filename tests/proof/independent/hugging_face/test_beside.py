"""The shared decoder and transformers agree, and a bug in the first is told by its part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, RopeScaling
from echelon.core.plan import Plan
from echelon.models import moe
from echelon.proof.claims.checks import Check
from echelon.proof.independent import attention
from echelon.proof.independent.comparison import BACKWARD, TRANSFORMERS, independent_pass
from echelon.proof.independent.hugging_face import beside
from echelon.proof.independent.hugging_face.beside import (
    class_beside,
    first_part_unlike_transformers,
    transformers_checks,
    why_not_beside,
)
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.proof.independent.model_bugs import rotary_turns_the_other_way
from tests.proof.independent.shared_bugs import Patch, changed
from tests.proof.layouts import Changes, layout
from tests.training.weights.transformers_models import DEEPSEEK

SCALING = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
)
GPT2: Changes = {
    "norm": "layernorm",
    "positions": "learned",
    "gated": False,
    "activation": "gelu",
    "kv_heads": 4,
    "tied": True,
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
}
EXPERTS = Experts(num_experts=4, top_k=2, ffn=12)
LATENT: Changes = {
    name: getattr(DEEPSEEK, name)
    for name in ("latent", "experts", "kv_heads", "head_dim", "norm_eps", "layers")
}
FAMILIES: dict[str, Changes] = {
    "LlamaForCausalLM": {"rope_scaling": SCALING, "rope_theta": 100.0},
    "MistralForCausalLM": {"window": 4},
    "Qwen2ForCausalLM": {"qkv_bias": True, "window": 3},
    "Qwen3ForCausalLM": {"qk_norm": True, "tied": True},
    "GPT2LMHeadModel": GPT2,
    "MixtralForCausalLM": {"experts": EXPERTS, "window": 4},
    "Qwen3MoeForCausalLM": {"experts": replace(EXPERTS, renormalise=False), "qk_norm": True},
    "DeepseekV3ForCausalLM": LATENT,
}


def plan_of(model: Changes, **mathematics: Balance) -> Plan:
    plan = layout(accumulation=1, dp=2, model=model)
    return shrink(
        replace(plan, mathematics=replace(plan.mathematics, **mathematics)), precision="fp64"
    )


def checks_of(plan: Plan, num_steps: int = 1) -> list[Check]:
    batches = [global_batch(plan, step) for step in range(num_steps)]
    return list(transformers_checks(plan, run_oracle(plan, num_steps), batches))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_holds(name: str) -> None:
    balance = Balance(kind="both") if name.startswith("Deep") else Balance()
    plan = plan_of(FAMILIES[name], balance=balance)
    assert (class_beside(plan), why_not_beside(plan)) == (name, "")
    checks = checks_of(plan, num_steps=3)
    assert {check.step for check in checks} == {0, 2}
    assert max(check.error for check in checks) < 1e-12
    step, batch = run_oracle(plan, 1)[0], global_batch(plan, 0)
    told = {check.subject for check in checks}
    assert told == {*step.gradients, *(f"token losses of sample {i}" for i in told_samples(plan))}
    assert first_part_unlike_transformers(plan, step, batch) is None


def told_samples(plan: Plan) -> set[int]:
    return {sample for step in (0, 2) for sample in global_batch(plan, step).sample_ids}


def test_a_rotary_angle_of_shared_code_is_caught_here_too(monkeypatch: Patch) -> None:
    plan = plan_of({})
    rotary_turns_the_other_way(monkeypatch)
    found = independent_pass(plan, 1)
    (claim,) = [one for one in found.claims if one.statement == TRANSFORMERS]
    assert claim.note == "LlamaForCausalLM"
    sample = global_batch(plan, 0).sample_ids[0]
    assert claim.failures[0].subject == f"token losses of sample {sample}"
    assert found.diagnosis is not None
    assert (found.diagnosis.where, found.diagnosis.tensor) == ("rotary positions", "layers.0")


def test_a_mistake_that_both_implementations_make_is_told_by_its_part(monkeypatch: Patch) -> None:
    plan = plan_of({})
    rotary_turns_the_other_way(monkeypatch)
    changed(monkeypatch, attention, "turns_of", lambda turns_TE: turns_TE.conj())
    found = independent_pass(plan, 1)
    assert [one.statement for one in found.claims if not one.holds] == [TRANSFORMERS]
    assert found.diagnosis is not None
    assert (found.diagnosis.where, found.diagnosis.tensor) == ("attention", "layers.0")
    assert "beside transformers; all before it agrees" in found.diagnosis.says


def test_gates_of_shared_code_are_caught_here_too(monkeypatch: Patch) -> None:
    plan = plan_of({"experts": EXPERTS})
    monkeypatch.setattr(moe, "gates_of", lambda scores, chosen, experts: scores.gather(-1, chosen))
    assert max(check.error for check in checks_of(plan)) > 1e-3
    step, batch = run_oracle(plan, 1)[0], global_batch(plan, 0)
    found = first_part_unlike_transformers(plan, step, batch)
    assert found is not None
    assert (found.part, found.unit) == ("MLP", "layers.0")


def test_a_backward_pass_that_differs_alone_is_told_by_its_tensor(monkeypatch: Patch) -> None:
    plan = plan_of({})
    theirs = beside.loss_and_gradients
    name = "layers.1.mlp.up.weight"

    def doubled(*args: object) -> object:
        found = theirs(*args)  # type: ignore[arg-type]
        return replace(found, gradients={**found.gradients, name: 2 * found.gradients[name]})

    monkeypatch.setattr(beside, "loss_and_gradients", doubled)
    found = independent_pass(plan, 1)
    assert found.diagnosis is not None
    assert (found.diagnosis.where, found.diagnosis.tensor) == (BACKWARD, name)
    assert found.diagnosis.says == "off by 0.5 beside transformers"


def test_what_is_not_compared_is_said_in_a_note(monkeypatch: Patch) -> None:
    found = independent_pass(plan_of({"dropout": 0.1}), 1)
    assert TRANSFORMERS not in {one.statement for one in found.claims}
    assert found.note == "not compared with transformers: its dropout draws other elements"
    monkeypatch.setattr(beside, "missing", lambda: "it is not installed")
    plan = plan_of({})
    assert checks_of(plan) == []
    assert why_not_beside(plan) == "not compared with transformers: it is not installed"
