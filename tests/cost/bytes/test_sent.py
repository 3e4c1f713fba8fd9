"""Bytes per step by axis: known sizes, and counts of messages taken one by one."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from echelon.core.parameters import parameters
from echelon.core.plan import Plan, Recompute, Zero
from echelon.cost.bytes.model_sizes import block_weights
from echelon.cost.bytes.sent import (
    bytes_sent,
    bytes_sent_by_axis,
    parameter_gather_tiers,
    stream_bytes,
)
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from tests.core.test_parameters import LLAMA2_7B
from tests.parallel.layouts import GPT2, NANO, QWEN, cut, plan_of
from tests.parallel.secondary.nodes import on_nodes, without_secondary

SEVENTY = replace(LLAMA2_7B, name="70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672)


def terms(plan: Plan, rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    """Return count and bytes of each term of a rank."""
    return {(term.axis, term.name): (term.count, term.each) for term in bytes_sent(plan, rank)}


def seventy(**changes: Any) -> Plan:
    """Return the plan of a 70B model over eight tensor ranks, 2048 tokens in two bytes each."""
    return plan_of(
        model=SEVENTY,
        tp=8,
        microbatches=1,
        sequence_length=2048,
        stages=cut(80, 1),
        dtype="bf16",
        **changes,
    )


def test_seventy_billion_over_eight_tensor_ranks() -> None:
    found = terms(seventy())
    count, each = found["tp", "blocks forward"]
    # The messages of a forward pass are 5.37 GB (not TB); a ring sends 2 (n-1)/n of them.
    assert count * stream_bytes(seventy()) == 5_368_709_120
    assert count * each == 5_368_709_120 * 2 * 7 // 8
    assert round(count * each / 1e9, 1) == 9.4
    both = count * each + found["tp", "blocks backward"][0] * found["tp", "blocks backward"][1]
    assert round(both / 1e9, 2) == 18.79


def test_sequence_parallelism_sends_as_much_forward_and_half_more_backward() -> None:
    plain, split = terms(seventy()), terms(seventy(sequence_parallel=True))

    def total(found: dict[tuple[str, str], tuple[int, int]], name: str) -> int:
        count, each = found["tp", name]
        return count * each

    assert total(split, "blocks forward") == total(plain, "blocks forward")
    assert 2 * total(split, "blocks backward") == 3 * total(plain, "blocks backward")


def test_one_device_sends_nothing() -> None:
    assert bytes_sent(plan_of(), 0) == ()
    assert bytes_sent_by_axis(plan_of(), 0) == {}


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_data_ranks_send_their_gradients_once(degree: int) -> None:
    plan = plan_of(dp=degree, microbatches=3, bucket_bytes=2**20)
    padded = -(-num_elements() // degree) * degree
    assert terms(plan) == {
        ("dp", "gradients"): (1, 2 * (degree - 1) * padded * 8 // degree),
        ("dp", "token count"): (1, (degree - 1) * 8),
        ("world", "step row"): (1, (degree - 1) * 40),
    }


def num_elements() -> int:
    """Return the weights of NANO, written out."""
    block = 16 + 16 * 16 + 8 * 16 + 8 * 16 + 16 * 16 + 16 + 3 * 24 * 16
    return 4 * block + 37 * 16 + 16 + 37 * 16


def test_pipeline_ranks_pass_one_tensor_each_way() -> None:
    plan = plan_of(pp=4, microbatches=5)
    message = 8 * 16 * 8
    assert stream_bytes(plan) == message
    for rank in range(4):
        found = terms(plan, rank)
        assert found.get(("pp", "activations")) == (None if rank == 3 else (5, message))
        assert found.get(("pp", "gradients")) == (None if rank == 0 else (5, message))
    # Three boundaries: 3 M sends forward and 3 M back.
    sent = sum(bytes_sent_by_axis(plan, rank)["pp"] for rank in range(4))
    assert sent == 2 * 3 * 5 * message


def test_a_slice_of_the_stream_travels_under_sequence_parallelism() -> None:
    plan = plan_of(pp=2, tp=2, sequence_parallel=True)
    assert terms(plan)["pp", "activations"] == (2, stream_bytes(plan) // 2)


def test_a_tied_embedding_is_summed_between_the_ends() -> None:
    plan = plan_of(model=QWEN, pp=4, tp=2)
    size = 19 * 16 * 8
    tied = [terms(plan, rank).get(("pp", "tied embedding")) for rank in range(8)]
    assert tied == [(1, size)] * 2 + [None] * 4 + [(1, size)] * 2


def test_a_tensor_rank_term_by_term() -> None:
    plan = plan_of(model=GPT2, tp=2, microbatches=3, recompute=Recompute(policy="full", every=2))
    stream = stream_bytes(plan)
    assert terms(plan) == {
        ("tp", "blocks forward"): (3 * 2 * 4, stream),
        ("tp", "blocks forward again"): (3 * 2 * 2, stream),
        ("tp", "blocks backward"): (3 * 2 * 4, stream),
        ("tp", "embedding"): (3, stream),
        ("tp", "head"): (3, stream),
        ("tp", "loss statistics"): (3, 3 * 8 * 8),
        ("world", "step row"): (1, 40),
    }


def test_a_scattered_tensor_rank_term_by_term() -> None:
    plan = plan_of(model=QWEN, tp=2, microbatches=3, sequence_parallel=True)
    piece = stream_bytes(plan) // 2
    found = terms(plan)
    assert found["tp", "blocks forward"] == (3 * 4 * 4, piece)
    assert found["tp", "blocks backward"] == (3 * 6 * 4, piece)
    assert found["tp", "embedding"] == found["tp", "head"] == (3 * 2, piece)
    norms = 4 * (16 + 16 + 4 + 4) + 16
    assert found["tp", "replicated parameters"] == (1, norms * 8)


def test_axes_add_up_their_terms() -> None:
    plan = plan_of(model=QWEN, pp=2, dp=2, tp=2)
    by_axis = bytes_sent_by_axis(plan, 5)
    assert set(by_axis) == {"dp", "tp", "pp", "world"}
    for axis, total in by_axis.items():
        assert total == sum(term.bytes for term in bytes_sent(plan, 5) if term.axis == axis)


def test_accumulation_leaves_the_data_axis_alone() -> None:
    one, many = plan_of(dp=2, microbatches=1), plan_of(dp=2, microbatches=16)
    assert bytes_sent_by_axis(one, 0) == bytes_sent_by_axis(many, 0)
    assert (
        bytes_sent_by_axis(plan_of(model=NANO, tp=2, microbatches=4), 0)["tp"]
        == 4 * (bytes_sent_by_axis(plan_of(model=NANO, tp=2, microbatches=1), 0)["tp"])
    )


OLMO = replace(NANO, norm_place="after", qk_norm=True, qk_norm_over="width")


def sent(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return count and bytes of the terms of these norms."""
    return {
        term.name.removeprefix("norms of all heads "): (term.count, term.each)
        for term in bytes_sent(plan, 0)
        if term.name.startswith("norms of all heads")
    }


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 4), ("fp64", 8)])
def test_two_numbers_of_a_token_are_summed_in_each_pass(dtype: str, size: int) -> None:
    plan = plan_of(model=OLMO, tp=2, dtype=dtype)
    passes = OLMO.layers * plan.num_microbatches
    message = 2 * plan.local_tokens * size
    assert sent(plan) == {"forward": (passes, message), "backward": (passes, message)}
    assert sent(plan_of(model=OLMO, dtype=dtype)) == {}
    assert sent(plan_of(model=replace(OLMO, qk_norm_over="head"), tp=2, dtype=dtype)) == {}


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        (Recompute(policy="selective", operators=("attention",)), 1.0),
        (Recompute(policy="selective", operators=("mlp",)), 0.0),
        (Recompute(policy="full", every=1), 1.0),
    ],
)
def test_they_travel_again_where_attention_is_made_again(
    recompute: Recompute, again: float
) -> None:
    plan = plan_of(model=OLMO, tp=2)
    plan = replace(plan, layout=replace(plan.layout, recompute=recompute))
    found = sent(plan)
    assert found.get("forward again", (0, 0))[0] == again * found["forward"][0]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_has_its_part_of_the_weight(tp: int) -> None:
    plan = plan_of(model=OLMO, tp=tp)
    specs = [one for one in parameters(OLMO) if one.layer == 0]
    held = sum(prod(one.shape) // (1 if one.split_dim is None else tp) for one in specs)
    work = cost_inputs_from_plan(plan)
    assert float(block_weights(work.model, work.layout, mixture=False)[0]) == held
    assert {one.name: one.split_dim for one in specs}["layers.0.attention.q_norm.weight"] == 0


def test_one_gather_of_a_step_crosses_nodes_and_all_others_stay() -> None:
    zero = Zero(stage=3, accumulate="slices", secondary=True)
    plan = on_nodes(plan_of(dp_shard=8, microbatches=3, zero=zero), 4)
    buckets = plan_buckets(plan, rank_part(plan, 0))
    elements = {bool(b.backward_units): 0 for b in buckets}
    for bucket in buckets:
        elements[bool(bucket.backward_units)] += bucket.num_elements
    both, looked_up = elements[True] * 8, elements[False] * 8  # bytes
    near, far = parameter_gather_tiers(plan, 5)
    assert far == (both + looked_up) * 4 // 8
    later = 5 * both + 2 * looked_up
    assert near == (both + looked_up) * 3 // 8 + later * 3 // 4
    plain = parameter_gather_tiers(without_secondary(plan), 5)
    assert plain == ((6 * both + 3 * looked_up) * 3 // 8, (6 * both + 3 * looked_up) * 4 // 8)


def test_inside_of_one_node_nothing_crosses() -> None:
    plan = plan_of(dp_shard=4, zero=Zero(stage=3))
    near, far = parameter_gather_tiers(plan, 0)
    assert near > 0
    assert far == 0
    alone = on_nodes(replace(plan), 1)
    assert parameter_gather_tiers(alone, 0) == (0, near)
