"""Closed forms of sizes, messages and rates, against plans where a plan has them."""

from __future__ import annotations

import pytest

from echelon.cost.bytes_sent import bytes_sent
from echelon.cost.collectives import all_reduce_bytes
from echelon.cost.flops import model_flops_per_token
from echelon.cost.model_sizes import (
    achieved_flops,
    expert_message_bytes,
    mlp_weights,
    model_flops_utilization,
    num_buckets,
    ring_steps,
    tensor_message_bytes,
)
from tests.planner.guides.situations import plan_of


def test_forward_sums_over_tensor_ranks_are_those_of_a_plan() -> None:
    plan = plan_of("llama2-7b 8xh100 mesh.tp=8 mesh.sequence_parallel=false")
    (term,) = (term for term in bytes_sent(plan, 0) if term.name == "blocks forward")
    message = tensor_message_bytes(32, 1, 4096, 4096) * plan.num_microbatches
    assert term.bytes == all_reduce_bytes(message, 8)


def test_rows_to_experts_and_back_are_those_of_a_plan() -> None:
    plan = plan_of("mixtral-8x7b 8xh100 mesh.dp_shard=8 mesh.ep=8 zero.stage=1")
    trips = {"dispatch forward", "combine forward"}
    sent = sum(term.bytes for term in bytes_sent(plan, 0) if term.name in trips)
    blocks = plan.model.layers * plan.num_microbatches
    ours = blocks * expert_message_bytes(plan.local_tokens, 4096, 2, 8)
    assert sent == pytest.approx(ours, rel=1e-3)


def test_small_forms() -> None:
    assert mlp_weights(4096, 16384) == 2 * 67_108_864
    assert mlp_weights(4096, 11008, matrices=3) == 135_266_304
    assert num_buckets(14e9, 25 * 2**20) == 535
    assert num_buckets(1, 8) == 1
    assert [ring_steps(n) for n in (1, 2, 4)] == [0, 2, 6]


def test_utilization_undoes_what_is_achieved() -> None:
    each = model_flops_per_token(plan_of("llama2-7b 8xh100").model, 4096)
    rate = achieved_flops(8, 989e12, 0.4)
    assert rate == pytest.approx(3.1648e15)
    assert model_flops_utilization(rate / each, each, 8, 989e12) == pytest.approx(0.4)
