"""Several parts as one: their order, their columns, and what is merged of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.training.steps.part import CheckpointScope, StepPart, StepParts, StepResult
from tests.training.steps.test_part import RESULT


class Named(StepPart):
    """Writes down what it is asked, and tells numbers of its own."""

    def __init__(self, name: str, calls: list[str], *, told: int = 0) -> None:
        self.name, self.calls, self.num_told = name, calls, told

    @contextmanager
    def running(self, loss_scale: float) -> Iterator[None]:
        self.calls.append(f"in {self.name}")
        yield
        self.calls.append(f"out {self.name}")

    def gradients_complete(self) -> Sequence[float]:
        return [float(len(self.name))] * self.num_told

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        return replace(result, tokens=result.tokens + int(rows.sum()), loss=result.loss * 2)

    def held_back(self, step: int) -> Collection[str]:
        return {self.name}

    def position(self) -> Mapping[str, Any]:
        return {self.name: 1}

    def speaks(self, step: int) -> bool | None:
        return {"a": None, "bb": step > 1}.get(self.name)


class Other(StepPart):
    """Another class."""


def both() -> tuple[StepParts, list[str]]:
    calls: list[str] = []
    return StepParts([Named("a", calls, told=2), Named("bb", calls, told=1)]), calls


def test_parts_are_called_in_their_order_and_left_in_the_opposite_one() -> None:
    parts, calls = both()
    with parts.running(1.0):
        calls.append("run")
    assert calls == ["in a", "in bb", "run", "out bb", "out a"]


def test_each_part_has_its_columns_of_what_is_told() -> None:
    parts, _ = both()
    assert parts.num_told == 3
    assert parts.gradients_complete() == [1.0, 1.0, 2.0]
    result = parts.agreed(RESULT, torch.tensor([[1.0, 1.0, 2.0], [10.0, 10.0, 20.0]]))
    assert (result.tokens, result.loss) == (RESULT.tokens + 22 + 22, RESULT.loss * 4)


def test_positions_and_buckets_that_wait_are_merged() -> None:
    parts, _ = both()
    assert parts.position() == {"a": 1, "bb": 1}
    assert parts.held_back(0) == {"a", "bb"}


def test_one_part_at_most_says_what_a_checkpoint_holds() -> None:
    parts, _ = both()
    assert type(parts.scope) is CheckpointScope
    wider, narrower = Other(), Other()
    wider.checkpoint = CheckpointScope()
    assert StepParts([wider, narrower]).scope is wider.checkpoint
    narrower.checkpoint = CheckpointScope()
    with pytest.raises(ValueError, match="too many values"):
        StepParts([wider, narrower])


def test_a_rank_speaks_where_no_part_says_otherwise() -> None:
    parts, _ = both()
    assert (parts.speaks(1), parts.speaks(2)) == (False, True)
    assert StepParts([Other()]).speaks(1) is None


def test_a_part_is_found_by_its_class() -> None:
    parts, _ = both()
    assert parts.find(Other) is None
    found = parts.find(Named)
    assert found is not None
    assert found.name == "a"


def test_two_parts_with_one_key_are_refused() -> None:
    """A checkpoint would hold the values of one of them alone."""
    parts = StepParts([Named("a", []), Named("a", [])])
    with pytest.raises(AssertionError, match="two step parts have the keys"):
        parts.position()
