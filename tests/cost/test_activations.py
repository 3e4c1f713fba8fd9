"""Formulas of activations: one plan, arrays of plans, and the terms of a peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.core.plan import Plan, Recompute
from echelon.cost.activation_numbers import ActivationNumbers, total
from echelon.cost.activations import RankActivations, activation_rows
from echelon.cost.activations_attention import attention_operators
from echelon.cost.activations_ends import head_operators
from echelon.cost.activations_linear import mlp_operators
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO, plan_of
from tests.parallel.pipelines import pipeline_plan

PLANS = {
    "dense": plan_of(),
    "sequence parallel": plan_of(tp=2, sequence_parallel=True, dtype="bf16"),
    "context": plan_of(cp=2, model=GPT2),
    "experts": plan_of(model=DEEPSEEK, dp_shard=2, ep=2),
    "zero bubble": pipeline_plan("zb-h1", 2),
    "on the host": plan_of(recompute=Recompute(policy="full", offload="host")),
}


def test_a_block_keeps_what_korthikanti_counts_less_scores_and_dropout() -> None:
    # 34 s b h with 4h: here no mask (1 + 1), no softmax inputs, no second copy of the GELU input.
    model = replace(GPT2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256)
    x = ActivationNumbers.of(plan_of(model=model, dtype="bf16"))
    kept = sum(total(one.saved) for one in (*attention_operators(x), *mlp_operators(x)))
    stream, statistics = x.stream, x.tokens * (2 * 2 + x.heads) * 4
    # Two norms' inputs, q k v side by side, output, two linear inputs, and the MLP twice 4 h.
    assert kept == (2 + 3 + 1 + 2 + 8) * stream + statistics


@pytest.mark.parametrize("plan", list(PLANS.values()), ids=list(PLANS))
def test_terms_add_up_to_the_peak(plan: Plan) -> None:
    for rank in range(plan.mesh.world_size):
        told = list(RankActivations(plan, rank).actions())
        on_device = [term.bytes for term in activation_rows(plan, rank) if term.pool == "device"]
        assert min(on_device) > 0
        assert sum(on_device) == max(int(one.peak) for one in told)
        assert all(one.peak >= one.kept for one in told)


def test_stored_inputs_wait_on_the_host() -> None:
    plan = PLANS["on the host"]
    (host,) = [term for term in activation_rows(plan, 0) if term.pool == "host"]
    x = ActivationNumbers.of(plan)
    assert host.bytes == NANO.layers * x.stream


def test_one_formula_serves_numbers_and_arrays() -> None:
    plans = [plan_of(dtype="fp32"), plan_of(tp=2, dtype="bf16"), plan_of(microbatch_sequences=2)]
    each = [ActivationNumbers.of(plan) for plan in plans]
    names = ActivationNumbers.__dataclass_fields__
    stacked = {name: np.array([getattr(one, name) for one in each]) for name in names}
    together = ActivationNumbers(**stacked)
    for make in (attention_operators, mlp_operators, head_operators):
        for place, one in enumerate(each):
            for alone, many in zip(make(one), make(together), strict=True):
                for name in ("saved_bytes", "waiting_bytes", "forward", "backward", "split"):
                    found = np.broadcast_to(getattr(many, name), 3)[place]
                    assert found == getattr(alone, name), (alone.name, name)
