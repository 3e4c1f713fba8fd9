"""A placement is what happens to an arange."""

from __future__ import annotations

import torch

from echelon.proof.evidence.captured import LogicalParameters
from echelon.proof.verify.placement.located import equal_slice, fused, located, padded

LOGICAL = LogicalParameters(shapes={"a": (4, 3), "b": (2, 3)}, aliases={"tied": "a"})


def test_names_of_tied_parameters_are_one() -> None:
    assert [LOGICAL.canonical(name) for name in ("a", "tied", "c")] == ["a", "a", None]
    assert LOGICAL.elements("b").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_fused_tensor_is_pieces_of_several() -> None:
    place = fused([("a", LOGICAL.elements("a")), ("b", LOGICAL.elements("b"))], dim=0)
    values = torch.arange(18.0)
    found = {name: (index.tolist(), part.tolist()) for name, index, part in place.pieces(values)}
    assert found["a"] == (list(range(12)), [float(i) for i in range(12)])
    assert found["b"] == (list(range(6)), [float(i) for i in range(12, 18)])
    later = [(name, index.tolist()) for name, index, _ in place.pieces(values[10:14], start=10)]
    assert later == [("a", [10, 11]), ("b", [0, 1])]


def test_groups_interleave_what_is_fused() -> None:
    place = fused([("a", LOGICAL.elements("a")), ("b", LOGICAL.elements("b"))], dim=0, groups=2)
    assert place.owner.tolist() == [0] * 6 + [1] * 3 + [0] * 6 + [1] * 3
    assert place.index.tolist() == [*range(6), *range(3), *range(6, 12), *range(3, 6)]


def test_what_does_not_divide_is_padded_and_padding_is_no_piece() -> None:
    second = equal_slice(torch.arange(5), 0, 2, 1)
    assert second.tolist() == [3, 4, -1]
    pieces = list(located("v", second).pieces(torch.tensor([7.0, 8.0, 9.0])))
    assert [(index.tolist(), values.tolist()) for _, index, values in pieces] == [
        ([3, 4], [7.0, 8.0])
    ]
    assert padded(torch.arange(2), 0, 2).tolist() == [0, 1]
