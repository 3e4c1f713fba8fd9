"""What readers share: names without their wrappers, the moment of a weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.training.weights.pickles import NotReadable, PickledTensor
from echelon.training.weights.stored import whole
from echelon.training.weights.trainers.contents import (
    flat_tensor,
    moment_of,
    shared_tensor,
    some,
    unwrapped,
)

TENSOR = whole(Path("a"), 0, "F32", (2,))


def test_only_our_own_names_lose_a_wrapper() -> None:
    ours = {"module.embedding.weight": TENSOR, "module.norm.weight": TENSOR}
    assert set(unwrapped(ours)) == {"embedding.weight", "norm.weight"}
    theirs = {"model.embed_tokens.weight": TENSOR}
    assert unwrapped(theirs) == theirs


def test_a_moment_is_found_with_a_wrapper_and_without() -> None:
    assert moment_of({"a.weight": TENSOR}, "model.a.weight") is TENSOR
    assert moment_of({"module.a.weight": TENSOR}, "a.weight") is TENSOR
    assert moment_of({"b.weight": TENSOR}, "a.weight") is None


def test_long_lists_are_counted() -> None:
    assert some(range(6)) == "0, 1, 2, 3 and 2 more"


def part(start: int, count: int) -> PickledTensor:
    """Return a buffer of `count` elements in a file."""
    return PickledTensor(file=Path("a"), start=start, dtype="F32", shape=(count,), stride=(1,))


def test_a_tensor_goes_on_in_the_next_part() -> None:
    found = flat_tensor([part(0, 5), part(100, 5)], 3, (2, 3))
    assert found.lacking == 0
    places = [(one.start, one.row, one.column, one.height, one.width) for one in found.blocks]
    assert places == [(12, 0, 0, 1, 2), (100, 0, 2, 1, 1), (104, 1, 0, 1, 3)]


def test_each_rank_has_a_part_and_padding_is_left_out() -> None:
    found = shared_tensor([[part(0, 3)], [part(100, 3)], [part(200, 3)]], 0, (7,))
    assert found.lacking == 0
    assert [(one.start, one.row, one.height) for one in found.blocks if one.start >= 200] == [
        (200, 6, 1)
    ]


def test_parts_that_end_before_are_refused() -> None:
    with pytest.raises(NotReadable, match="flat buffers of 5 elements, and 6 are wanted"):
        flat_tensor([part(0, 5)], 0, (2, 3))
