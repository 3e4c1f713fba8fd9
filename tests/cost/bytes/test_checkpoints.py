"""What a run writes, by formula: all weights, or adapters and once the frozen weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.parameters import num_parameters, num_trained_parameters
from echelon.core.plan import Mathematics, Optimizer, Precision
from echelon.cost.bytes.checkpoints import StoredBytes, stored_bytes
from tests.parallel.layouts import NANO

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
