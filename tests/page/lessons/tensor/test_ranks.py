"""What lessons about tensor ranks say of bytes is what the formulas give."""

from __future__ import annotations

from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.page.lessons.matrices import (
    degree_control,
    gather_fact,
    kinds_of,
    nothing_sent,
    sum_fact,
    weights_fact,
)


def test_bytes_are_those_of_the_formulas() -> None:
    assert gather_fact(8, 4, "Y").value == f"{all_gather_bytes(16, 4)} B" == "48 B"
    assert sum_fact(8, 4, "Y").value == f"{all_reduce_bytes(16, 4)} B" == "24 B"
    assert nothing_sent().value == "0 B"
    assert weights_fact(1500, 3000).value == "1,500 of 3,000"
    assert weights_fact(1500, 3000).note == "3.00 kB in bf16"


def test_every_rank_has_a_kind_beside_that_of_all() -> None:
    assert kinds_of(2) == ("whole on every rank", "the part of rank 0", "the part of rank 1")
    control = degree_control(2, 4, start=4)
    assert control.values[control.start] == "4"
