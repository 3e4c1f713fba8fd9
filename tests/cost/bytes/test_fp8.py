"""Bytes of 8-bit numbers: what is gathered, and what it is beside bf16."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import Precision
from echelon.cost.bytes.fp8 import fp8_row_bytes, fp8_scale_bytes
from echelon.cost.bytes.sent import bytes_sent
from tests.parallel.layouts import NANO, plan_of

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
