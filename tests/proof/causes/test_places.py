"""Slices of a tensor that are wrong are told by what they are counted in."""

from __future__ import annotations

import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.places import (
    describe_slice,
    places_of_tokens,
    told_by_slice,
    wrong_elements,
)


def mask(shape: tuple[int, ...], *where: slice) -> torch.Tensor:
    """Return a mask that is true in one box."""
    found = torch.zeros(shape, dtype=torch.bool)
    found[where] = True
    return found


def test_a_box_is_told_by_the_dims_that_it_cuts() -> None:
    assert describe_slice(mask((8,), slice(6, 8))) == "elements 6:8 of dim 0"
    assert describe_slice(mask((8, 4), slice(2, 5))) == "elements 2:5 of dim 0"
    both = mask((8, 4), slice(2, 5), slice(1, 2))
    assert describe_slice(both) == "elements 2:5 of dim 0, elements 1:2 of dim 1"
    assert describe_slice(both, ("rows", "columns")) == "rows 2:5, columns 1:2"


def test_a_run_of_elements_is_counted_row_by_row() -> None:
    flat = mask((32,), slice(6, 22)).view(8, 4)
    flat[3, 2] = False  # right by chance
    assert describe_slice(flat) == "elements 1:6 of dim 0"
    few = mask((32,), slice(3, 5)).view(2, 16)
    assert describe_slice(few.view(8, 4)) == "elements 3:5, counted row by row"


def test_no_slice_is_told_of_all_of_it_nothing_or_what_is_scattered() -> None:
    for wrong in (torch.ones(4, 4), torch.zeros(4, 4), torch.eye(4)):
        assert describe_slice(wrong.bool()) == ""
    finding = ProofFinding("none", "another function")
    assert told_by_slice(finding, "") == finding
    told = told_by_slice(finding, "rows 2:3")
    assert (told.factor, told.description) == ("slice", "in rows 2:3 only: another function")
    stale = ProofFinding("stale", "old")
    assert told_by_slice(stale, "rows 2:3").factor == "stale"


def test_an_element_that_is_no_number_is_wrong() -> None:
    right = torch.ones(4, dtype=torch.float64)
    seen = torch.tensor([1.0, 1.0 + 1e-12, 2.0, torch.nan], dtype=torch.float64)
    assert wrong_elements(seen, right, 1e-10).tolist() == [False, False, True, True]


def test_tokens_are_told_by_position_by_row_of_a_rank_or_by_column() -> None:
    in_order = torch.arange(8).expand(2, 8)
    wrong = mask((2, 8, 6), slice(None), slice(6, 8))
    assert list(places_of_tokens(wrong, in_order)) == ["positions 6:8"]
    second = mask((2, 8, 6), slice(1, 2), slice(2, 4), slice(0, 3))
    assert list(places_of_tokens(second, in_order)) == ["sequences 1:2, positions 2:4"]
    columns = mask((2, 8, 6), slice(None), slice(None), slice(4, 6))
    assert list(places_of_tokens(columns, in_order)) == ["columns 4:6"]
    # Two ranks of four positions each, of which the last is wrong.
    last = torch.zeros(2, 8, 6, dtype=torch.bool)
    last[:, [3, 7]] = True
    assert list(places_of_tokens(last, torch.arange(4).repeat(2).expand(2, 8))) == [
        "rows 3:4 of each rank"
    ]
    assert not list(places_of_tokens(torch.ones(2, 8, 6).bool(), in_order))
