"""The bound of a rounded sum, by hand for two nodes of two ranks, and what is noted of a sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan, Zero
from echelon.proof.sum_bounds import (
    SumNotes,
    notes_as_json,
    notes_from_json,
    with_exact_sums,
    with_rounded_sums,
)
from tests.parallel.layouts import plan_of
from tests.parallel.secondary.nodes import on_nodes


def rounded() -> Plan:
    return on_nodes(plan_of(dp_shard=4, zero=Zero(stage=2, reduce="int4")), 2)


@dataclass
class AllParts:
    """A group whose members' parts are known here."""

    parts: list[torch.Tensor]
    index: int = 1
    ranks: tuple[int, ...] = (0, 1, 2, 3)

    def gather_objects(self, value: Any) -> list[torch.Tensor]:
        return self.parts


@dataclass
class Name:
    name: str


@dataclass
class OneSlot:
    spec: Name
    start: int
    end: int


@dataclass
class OneBucket:
    own: slice
    slots: list[OneSlot] = field(default_factory=list)

    def within_own_slice(self, part: slice) -> slice:
        length = self.own.stop - self.own.start
        start = min(max(part.start - self.own.start, 0), length)
        return slice(start, max(start, min(part.stop - self.own.start, length)))


def test_the_bound_is_half_a_step_of_each_rounding() -> None:
    parts = torch.tensor([[3.0, 1.0], [10.0, 0.0], [-7.0, 2.0], [100.0, 5.0]]).double()
    found = SumNotes(rounded()).bound(AllParts(list(parts)), parts)  # type: ignore[arg-type]
    # Rank 1 is place 1 of node 0: ranks 0 and 2 round for it, then the sum of node 1.
    first, second = 3.0 / 14, 7.0 / 14
    wanted = first + second + (93.0 + second) / 14
    assert torch.allclose(found, torch.full((2,), wanted, dtype=torch.float64))


def test_what_is_off_by_more_than_its_bound_is_told_by_tensor() -> None:
    wholes = [torch.randn(8, dtype=torch.float64) for _ in range(4)]
    bucket = OneBucket(slice(2, 4), [OneSlot(Name("a"), 0, 3), OneSlot(Name("b"), 3, 8)])
    notes = SumNotes(rounded())
    total = torch.stack(wholes).sum(0)[2:4]
    bound = notes.bound(AllParts(wholes), torch.stack(wholes)[:, 2:4])  # type: ignore[arg-type]
    total = total + torch.stack([bound[0] / 2, bound[1] * 3])
    notes.see(AllParts(wholes), bucket, wholes[1], total)  # type: ignore[arg-type]
    shares = {note.name: note.error / note.bound for note in notes.found}
    assert shares == {"a": pytest.approx(0.5), "b": pytest.approx(3.0)}
    assert notes_from_json(notes_as_json(notes.found)) == tuple(notes.found)


def test_what_overflows_is_not_compared() -> None:
    wholes = [torch.full((8,), torch.inf, dtype=torch.float64)] * 4
    notes = SumNotes(rounded())
    notes.see(AllParts(wholes), OneBucket(slice(2, 4)), wholes[1], wholes[1][2:4])  # type: ignore[arg-type]
    assert notes.found == []


def test_a_plan_is_proven_with_exact_sums_and_run_with_its_own() -> None:
    plan = rounded()
    exact = with_exact_sums(plan)
    assert exact.layout.zero.reduce == "exact"
    assert with_rounded_sums(exact, plan) == [plan]
    assert with_rounded_sums(exact, exact) == []
