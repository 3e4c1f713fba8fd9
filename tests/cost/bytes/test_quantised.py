"""Bytes of 8-bit numbers: what is gathered, and what it is beside bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Plan, Precision, ReduceKind, Zero
from echelon.cost.bytes.quantised import (
    blocks_of_slice,
    encoding_bytes,
    ending_bytes,
    fp8_row_bytes,
    fp8_scale_bytes,
    message_bytes,
    quantised_sum_copies,
    second_hop_bytes,
    second_hop_copies,
)
from echelon.cost.bytes.sent import bytes_sent
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.stage import rank_part
from tests.parallel.layouts import NANO, plan_of
from tests.parallel.secondary.nodes import on_nodes

FP8 = Precision(parameters="bf16", matmul="fp8", fp8_block=8)


def test_a_number_takes_one_byte_and_a_tile_four_more() -> None:
    assert fp8_scale_bytes(1024, FP8) == 512
    assert fp8_row_bytes(1024, FP8) == 1024 + 512
    assert fp8_row_bytes(4096, replace(FP8, fp8_block=128)) == 4096 * 33 // 32


def test_what_sequence_parallelism_gathers_is_in_8_bits_and_what_it_sums_is_not() -> None:
    plan = plan_of(tp=2, sequence_parallel=True, precision=FP8, microbatches=3)
    sent = {term.name: term for term in bytes_sent(plan, 0) if term.axis == "tp"}
    passes = 3 * NANO.layers
    half = 8 * NANO.hidden // 2  # numbers of half of the tokens
    assert sent["blocks forward, codes"].count == 2 * passes
    assert sent["blocks forward, codes"].each == half
    assert sent["blocks forward, scales"].each == half // 8 * 4
    assert sent["blocks backward, codes"].count == 4 * passes
    # Sums: after attention and the MLP, and of the gradients of their inputs.
    assert sent["blocks forward"].count == sent["blocks backward"].count == 2 * passes
    assert sent["blocks forward"].each == 2 * half


def test_whole_rows_are_sent_as_ever() -> None:
    plan = plan_of(tp=2, precision=FP8)
    plain = plan_of(tp=2, precision=Precision(parameters="bf16"))
    assert bytes_sent(plan, 0) == bytes_sent(plain, 0)


@pytest.mark.parametrize(
    ("count", "kind", "scale", "wanted"),
    [
        (128, "int8", 4, 132),
        (128, "int4", 4, 68),
        (129, "int8", 4, 264),
        (1, "int4", 8, 72),
    ],
)
def test_a_slice_is_whole_blocks(count: int, kind: ReduceKind, scale: int, wanted: int) -> None:
    assert message_bytes(count, kind, scale) == wanted
    assert blocks_of_slice(count) == -(-count // 128)


def rounded(kind: ReduceKind = "int8", **changes: object) -> Plan:
    zero = Zero(stage=2, accumulate="slices", reduce=kind)
    plan = plan_of(dp_shard=6, precision=Precision(), zero=replace(zero, **changes), microbatches=3)
    return on_nodes(plan, 2)


def test_both_hops_are_counted_for_every_microbatch_that_is_summed() -> None:
    plan = rounded()
    slices = [slice_elements(plan, one) for one in plan_buckets(plan, rank_part(plan, 0))]
    each = sum(message_bytes(count, "int8", 4) for count in slices)
    terms = {term.name: term for term in bytes_sent(plan, 0)}
    near, far = terms["gradients, in nodes"], terms["gradients, across nodes"]
    assert (near.axis, near.count, near.each) == ("dp_shard_within", 3, (2 - 1) * 3 * each)
    assert (far.axis, far.count, far.each) == ("dp_shard_across", 3, (3 - 1) * each)
    once = {term.name: term for term in bytes_sent(rounded(accumulate="whole"), 0)}
    assert once["gradients, in nodes"].count == 1


def test_what_is_beside_a_sum_is_codes_both_ways_and_then_sums_of_a_place() -> None:
    plan = rounded("int4")
    for bucket in plan_buckets(plan, rank_part(plan, 0)):
        count = slice_elements(plan, bucket)
        size = message_bytes(count, "int4", 4)
        assert quantised_sum_copies(plan, bucket) == 2 * 6 * size
        numbers = 3 * blocks_of_slice(count) * 128
        assert encoding_bytes(plan, bucket) == 2 * numbers * 4
        assert second_hop_copies(plan, bucket) == 3 * count * 4 + 2 * 3 * size + 2 * numbers * 4
        assert second_hop_bytes(plan, bucket) == count * 4 + 2 * 3 * size
        decoded = (2 * numbers // 3 + blocks_of_slice(count)) * 4
        assert ending_bytes(plan, bucket) == max(0, decoded - 3 * size)
    exact = rounded("exact")
    bucket = plan_buckets(exact, rank_part(exact, 0))[0]
    assert quantised_sum_copies(exact, bucket) == second_hop_copies(exact, bucket) == 0
    assert second_hop_bytes(exact, bucket) == ending_bytes(exact, bucket) == 0
