"""Experts one after the other: outputs and all gradients as autograd gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch.nn import functional as fn

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Precision
from echelon.launch.local.supervisor import RankPool
from echelon.models.moe import Expert, MixtureOfExperts
from echelon.parallel.expert.feed_forward import ExpertFeedForward
from echelon.parallel.tensor import TensorSplit
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.parallel.one_rank import alone
from tests.proof.layouts import Changes
from tests.walks.plans.bytes_walk import compare_plan

COUNTS = [3, 0, 5, 1, 0, 2, 0, 4]

FP8 = Precision(parameters="bf16", matmul="fp8", fp8_block=4)
PADDED = {
    "experts": ExpertLayout(padded=True),
    "balance": Balance(capacity_factor=1.5),
}


def by_autograd(expert: Expert, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return the weighted output of one expert."""
    inner = fn.silu(x @ expert.gate.weight.T) * (x @ expert.up.weight.T)
    return (inner * gates[:, None]) @ expert.down.weight.T


@pytest.mark.parametrize("exchanges", [False, True])
def test_outputs_and_gradients_are_those_of_autograd(exchanges: bool) -> None:
    model, groups = alone(plan_of(model=MIXTRAL))
    mixture = cast(MixtureOfExperts, model.stages[0].get_submodule("layers.0.mlp"))
    split = TensorSplit(
        group=groups.tensor, sequence_parallel=False, store=model.store, exchanges=exchanges
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(15, MIXTRAL.hidden, generator=generator, dtype=torch.float64)
    gates = torch.rand(15, generator=generator, dtype=torch.float64)
    dy = torch.randn(15, MIXTRAL.hidden, generator=generator, dtype=torch.float64)
    x, gates = x.requires_grad_(), gates.requires_grad_()
    held = mixture.held()
    rows = zip(held, x.split(COUNTS), gates.split(COUNTS), strict=True)
    expected = torch.cat([by_autograd(expert, part, one) for expert, part, one in rows])
    weights = dict(mixture.experts.named_parameters())
    wanted = torch.autograd.grad(expected, [x, gates, *weights.values()], dy)
    model.store.start_step()
    model.store.start_backward(last=True)
    y = ExpertFeedForward.apply(x, gates, held, COUNTS, split)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    slots = {id(slot.parameter): slot for bucket in model.buckets for slot in bucket.slots}
    y.backward(dy)
    # Where something is sent next, weight gradients wait for it.
    assert all(slots[id(one)].fresh is exchanges for one in weights.values())
    model.store.run_deferred()
    gradients = [x.grad, gates.grad, *(slots[id(one)].gradient for one in weights.values())]
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    assert not slots[id(held[1].down.weight)].gradient.any()


def wider(model: ModelShape) -> ModelShape:
    """Return a model whose experts two tensor ranks can share in whole tiles."""
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, ffn=16))


CASES: dict[str, Changes] = {
    "one": {"model": MIXTRAL},
    "ep2": {"model": MIXTRAL, "dp_shard": 2, "ep": 2},
    "shared, ep2, tp2 scattered": {
        "model": wider(DEEPSEEK),
        "dp_shard": 2,
        "ep": 2,
        "tp": 2,
        "sequence_parallel": True,
    },
    "pieces of experts": {
        "model": wider(MIXTRAL),
        "tp": 2,
        "experts": ExpertLayout(expert_tp=2),
    },
    "shared, zb-h1": {"model": DEEPSEEK, "pp": 2, "schedule": "zb-h1"},
    "padded": {"model": MIXTRAL, "dp_shard": 2, "ep": 2, **PADDED},
}


def plan_in_fp8(name: str) -> Plan:
    """Return the plan of a case, whose widths are multiples of 4 on every rank."""
    return plan_of(precision=FP8, microbatch_sequences=2, **CASES[name])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_bytes_sent_held_and_kept_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(plan_in_fp8(name), rank_pool.run)
    assert found.problems == ()
    assert found.kept > 0


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = prove(plan_in_fp8(name), run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert max(claim.max_error for claim in proof.passes[0].claims) <= 1e-10


@pytest.mark.slow
def test_bfloat16_is_proven(rank_pool: RankPool) -> None:
    proof = prove(plan_in_fp8("ep2"), run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16", "bf16, fp8"]
