"""Model state per rank: sixteen bytes a weight in fp32, a share of it per tensor and stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.parameters import num_parameters, num_trained_parameters
from echelon.core.plan import Mathematics, Optimizer, Precision
from echelon.cost.bytes.held import StoredBytes, bytes_held, stored_bytes
from tests.core.test_parameters import GPT2_SMALL, LLAMA2_7B
from tests.parallel.layouts import GPT2, NANO, cut, plan_of


def test_sixteen_bytes_a_weight_without_sharding() -> None:
    plan = plan_of(model=LLAMA2_7B, stages=cut(32, 1), dtype="fp32")
    terms = {term.name: term.bytes for term in bytes_held(plan, 0)}
    psi = num_parameters(LLAMA2_7B)
    assert terms == {"parameters": 4 * psi, "gradients": 4 * psi, "optimizer state": 8 * psi}
    assert sum(terms.values()) == 16 * psi
    # The two moments are twice the parameters, not more (fp32 throughout).
    assert terms["optimizer state"] == 2 * terms["parameters"]


def test_replicas_hold_the_same_but_for_padding() -> None:
    for dp in (1, 2, 3):
        plan = plan_of(dp=dp, bucket_bytes=2**20)
        psi = -(-num_parameters(NANO) // dp) * dp
        assert sum(term.bytes for term in bytes_held(plan, dp - 1)) == 4 * 8 * psi


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_hold_a_share_of_what_is_split_and_all_of_the_rest(tp: int) -> None:
    plan = plan_of(model=replace(GPT2, vocab=40), tp=tp, bucket_bytes=2**20)
    norms = 4 * (4 * 16 + 2 * 16) + 2 * 16 + 16 * 16
    split = num_parameters(plan.model) - norms
    assert {t.name: t.bytes for t in bytes_held(plan, 1)}["parameters"] == 8 * (split // tp + norms)


def test_thirty_five_gigabytes_for_seventy_billion_over_thirty_two_ranks() -> None:
    # 16 psi / (tp pp): the published 35 GB at 70e9 weights, within what the ends add.
    model = replace(
        LLAMA2_7B, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672
    )
    plan = plan_of(model=model, tp=8, pp=4, stages=cut(80, 4), dtype="fp32")
    per_rank = [sum(term.bytes for term in bytes_held(plan, rank)) for rank in range(0, 32, 8)]
    expected = 16 * num_parameters(model) / 32
    assert sum(per_rank) / 4 == pytest.approx(expected, rel=1e-3)
    assert sum(per_rank) / 4 / 1e9 == pytest.approx(35.0, rel=0.03)


def test_each_term_has_its_own_precision() -> None:
    plan = plan_of(model=GPT2_SMALL, stages=cut(12, 1))
    mixed = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
    plan = replace(plan, mathematics=replace(plan.mathematics, precision=mixed))
    psi = num_parameters(GPT2_SMALL)
    terms = bytes_held(plan, 0)
    assert [term.name for term in terms] == [
        "parameters",
        "gradients",
        "master parameters",
        "optimizer state",
    ]
    assert [term.bytes for term in terms] == [2 * psi, 4 * psi, 4 * psi, 8 * psi]
    assert [term.formula for term in terms] == [
        f"{psi:,} x 2",
        f"{psi:,} x 4",
        f"{psi:,} x 4",
        f"2 x {psi:,} x 4",
    ]


ADAPTED = replace(NANO, lora=Lora(rank=4, alpha=8.0, targets=LINEARS))
BF16 = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")


def numbers(shape: object, **changes: object) -> Mathematics:
    whole = Mathematics(model=NANO, global_sequences=4, sequence_length=16)
    return replace(whole, model=shape, **changes)


def test_a_model_that_is_trained_whole_has_no_base() -> None:
    weights = num_parameters(NANO)
    assert stored_bytes(numbers(NANO)) == StoredBytes(
        trained=4 * weights, optimizer=8 * weights, base=0
    )
    one = stored_bytes(numbers(NANO, optimizer=Optimizer(kind="sgd")))
    assert one.checkpoint == 8 * weights


def test_adapters_alone_are_in_a_checkpoint() -> None:
    trained = num_trained_parameters(ADAPTED)
    frozen = num_parameters(ADAPTED) - trained
    assert frozen == num_parameters(NANO)
    one = stored_bytes(numbers(ADAPTED))
    assert (one.checkpoint, one.base) == (12 * trained, 4 * frozen)
    half = stored_bytes(numbers(ADAPTED, precision=BF16))
    assert (half.checkpoint, half.base) == (12 * trained, 2 * frozen)


def test_muon_keeps_one_tensor_of_matrices_and_two_of_the_rest() -> None:
    one = stored_bytes(numbers(NANO, optimizer=Optimizer(kind="muon")))
    weights = num_parameters(NANO)
    assert 4 * weights < one.optimizer < 8 * weights
    assert one.trained == pytest.approx(4 * weights)
