"""Bytes per step by axis: known sizes, and counts of messages taken one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.plan import Plan, Recompute
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis, stream_bytes
from tests.core.test_parameters import LLAMA2_7B
from tests.parallel.layouts import GPT2, NANO, QWEN, cut, plan_of

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
