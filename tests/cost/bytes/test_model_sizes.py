"""What tutorials say about ZeRO, each fact recomputed by the formulas of the product."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.cost.bytes.model_sizes import (
    achieved_flops,
    attention_merge_errors,
    expert_message_bytes,
    kv_bytes,
    mlp_weights,
    num_buckets,
    ring_steps,
    tensor_message_bytes,
)
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import all_reduce_bytes
from tests.cost.bytes.golden.golden_traffic import COMMUNICATION, GRIDS
from tests.cost.bytes.golden.golden_zero import MEMORY, Fact
from tests.handbook.guides.situations import plan_of

FACTS = (*MEMORY, *COMMUNICATION, *GRIDS)


def agree(ours: Any, correct: Any) -> bool:
    """Return whether two values agree, to the digits to which published ones are rounded."""
    if isinstance(correct, list):
        pairs = zip(ours, correct, strict=True)
        return all(agree(one, other) for one, other in pairs)
    if isinstance(correct, bool | str) or correct is None:
        return ours == correct
    return ours == pytest.approx(correct, rel=3e-4)


@pytest.mark.system("S44")
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.id)
def test_our_formulas_give_the_fact(fact: Fact) -> None:
    assert agree(fact.ours(), fact.correct), f"{fact.claim}: {fact.ours()}, not {fact.correct}"


def test_no_fact_is_missing_or_told_twice() -> None:
    ids = [fact.id for fact in FACTS]
    numbers = [f"002-{n}" for n in range(31, 51)]
    numbers += [f"003-{n:02}" for n in (4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22)]
    numbers += ["003-23a", "003-23b", "003-23c", *(f"003-{n}" for n in range(63, 72))]
    assert sorted(ids) == sorted([*numbers, "004-03", "004-17", "X-02", "X-04"])


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


def test_what_a_job_achieves_is_a_share_of_its_peak() -> None:
    assert achieved_flops(8, 989e12, 0.4) == pytest.approx(3.1648e15)


LONG = 128 * 1024


GIB = 2**30


def test_keys_of_seven_billion_parameters_at_128k_are_64_gib_not_gb() -> None:
    found = kv_bytes(LONG, 4096, 32)
    assert found / GIB == 64.0
    assert found / 1e9 == pytest.approx(68.72, abs=0.01)


def test_keys_of_eighty_wide_blocks_and_what_eight_ranks_hold_of_them() -> None:
    block, whole = kv_bytes(LONG, 8192, 1), kv_bytes(LONG, 8192, 80)
    assert (block / GIB, whole / GIB) == (4.0, 320.0)
    assert whole / 1e9 == pytest.approx(343.6, abs=0.1)
    # 8 of 64 key heads.
    assert kv_bytes(LONG, 8192 // 8, 80) / GIB == 40.0
    # 40 GiB of all blocks on each of 8 ranks: 0.5 GiB of each block, not 5.
    assert (kv_bytes(LONG // 8, 8192, 80) / GIB, kv_bytes(LONG // 8, 8192, 1) / GIB) == (40, 0.5)


def test_only_a_merge_by_log_sum_exp_is_the_attention_of_one_device() -> None:
    alone, unweighted, merged = attention_merge_errors()
    assert alone > 0.1
    assert unweighted > 0.1
    assert merged < 1e-14
    assert max(attention_merge_errors(ranks=1)) < 1e-14
