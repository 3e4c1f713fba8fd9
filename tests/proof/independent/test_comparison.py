"""The oracle and the independent implementation agree for every family of presets, to 1e-10."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.config.presets import preset_names
from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.core.plan import LearningRateSchedule
from echelon.proof.independent.comparison import (
    BALANCE,
    COMPARISONS,
    DECAY,
    LOSSES,
    ROUTES,
    TRANSFORMERS,
    TwoRuns,
    compare,
)
from echelon.proof.oracle.loss_scale import with_overflow_scale
from echelon.proof.shrink import num_steps, shrink
from tests.proof.layouts import FP16, layout

FAMILIES = (
    *("nano", "gpt2", "llama3.1-405b", "mistral-7b", "mixtral-8x7b", "qwen3-0.6b"),
    *("qwen3-30b-a3b", "deepseek-v3"),
)
"""One preset of each family, and of its kinds."""

ONE_RANK = ("mesh.dp_shard=1", "batch.global_sequences=2", "batch.microbatch_sequences=1")


@pytest.mark.quick("mixtral-8x7b", "nano", "gpt2", "mistral-7b")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAMILIES else [pytest.mark.slow])
        for name in preset_names("models")
    ],
)
def test_every_family_of_presets_holds(name: str) -> None:
    plan = shrink(load_job(name, ONE_RANK).plan, precision="fp64")
    results = compare(TwoRuns.of(plan, 2))
    assert [one.statement for one in results if not one.holds] == []
    told = {one.statement: one.note for one in results}
    assert told[TRANSFORMERS].endswith(("ForCausalLM", "LMHeadModel"))
    assert COMPARISONS.keys() - told.keys() == (set() if plan.model.experts else {ROUTES, BALANCE})
    assert max(one.max_error for one in results) < 1e-11


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["nano", "mixtral-8x7b", "deepseek-v3"])
def test_scales_of_whole_tensors_hold(name: str) -> None:
    told = ("matmul=fp8", "fp8_scales=tensor", "fp8_history=2", "fp8_block=8")
    # Latent attention's gradients in e5m2 have a tie, which the two decide otherwise.
    kind = "e4m3" if name == "deepseek-v3" else "e5m2"
    precision = [f"precision.{one}" for one in (*told, f"fp8_gradients={kind}")]
    plan = shrink(load_job(name, (*ONE_RANK, *precision)).plan, precision="fp64")
    runs = TwoRuns.of(plan, 4)
    # Transformers has no products in 8 bits.
    wrong = [one.statement for one in compare(runs) if not one.holds]
    assert set(wrong) <= {TRANSFORMERS}
    for oracle, independent in runs.pairs():
        assert independent.fp8_after is not None
        for ours, theirs in zip(
            oracle.fp8_maxima_after.steps, independent.fp8_after.past, strict=True
        ):
            assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("schedule", ["linear", "wsd"])
def test_every_optimizer_and_schedule_holds(kind: str, schedule: LearningRateSchedule) -> None:
    rules = {"kind": kind, "schedule": schedule, "decay": "blocks", "clip_norm": None}
    plan = shrink(layout(optimizer=rules, accumulation=1, documents="separate"), precision="fp64")
    runs = TwoRuns.of(plan, 3)
    assert [one.statement for one in compare(runs) if not one.holds] == []
    assert runs.plan.mathematics.documents == "separate"


@pytest.mark.parametrize("drops", [False, True])
def test_steps_that_overflow_are_skipped_in_both(drops: bool) -> None:
    experts = {"experts": Experts(num_experts=4, top_k=2, ffn=8)} if drops else {}
    plan = layout(precision=FP16, accumulation=1, model=experts)
    balance = Balance(capacity_factor=1.0, drop="score") if drops else Balance()
    plan = replace(plan, mathematics=replace(plan.mathematics, balance=balance))
    plan = shrink(plan, precision="fp64")
    steps = num_steps(plan)
    runs = TwoRuns.of(with_overflow_scale(plan, steps), steps)
    assert [one.statement for one in compare(runs) if not one.holds] == []
    skipped = [one.skipped for one in runs.independent]
    assert (any(skipped), all(skipped)) == (True, False)


def test_a_comparison_fails_by_its_own_tensor() -> None:
    plan = shrink(layout(accumulation=1), precision="fp64")
    runs = TwoRuns.of(plan, 1)
    step = runs.oracle[0]
    name = "layers.1.mlp.up.weight"
    gradients = {**step.gradients, name: 2 * step.gradients[name]}
    wrong = replace(runs, oracle=[replace(step, gradients=gradients)])
    (failed,) = [one for one in compare(wrong) if not one.holds]
    assert [one.subject for one in failed.failures] == [name]
    assert failed.failures[0].error == pytest.approx(1.0)
    sums = {slot: (total, count + 1) for slot, (total, count) in step.microbatch_losses.items()}
    wrong = replace(runs, oracle=[replace(step, microbatch_losses=sums)])
    (failed,) = [one for one in compare(wrong) if not one.holds]
    assert failed.statement == LOSSES
    assert "tokens count instead of" in failed.failures[0].detail


def test_what_decays_is_compared_by_name() -> None:
    plan = shrink(layout(accumulation=1), precision="fp64")
    runs = TwoRuns.of(plan, 1)
    step = runs.oracle[0]
    one = step.updates["norm.weight"]
    decayed = replace(one, main=one.total - 1e-3, decay=one.decay + 1e-3)
    wrong = replace(runs, oracle=[replace(step, updates={**step.updates, "norm.weight": decayed})])
    (failed,) = [one for one in compare(wrong) if not one.holds]
    assert failed.statement == DECAY
    assert failed.failures[0].detail == "it decays, and does not decay by the rule"
