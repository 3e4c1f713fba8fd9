"""Tensors that an operator keeps, added up."""

from __future__ import annotations

from echelon.cost.activations.operator_memory import (
    OperatorMemory,
    saved_tensors,
    total_saved_bytes,
)


def test_what_an_operator_keeps_is_the_sum_of_its_tensors() -> None:
    kept = saved_tensors("norm", ("stream", 12, "n D s"), ("statistics", 4, "n w"))
    assert [one.operator for one in kept] == ["norm", "norm"]
    assert total_saved_bytes(kept) == 16
    operator = OperatorMemory(name="norm", saved=kept, kept_for_weight_gradient=kept[:1])
    assert (operator.saved_bytes, operator.weight_gradient_bytes, operator.remade_bytes) == (
        16,
        12,
        0,
    )
