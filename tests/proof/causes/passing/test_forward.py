"""A multiplier, a dropout mask and other rows of a table are told at the first wrong module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.proof.causes.passing.modules import explain_passing
from echelon.proof.evidence.captured import Reference
from echelon.proof.evidence.run import PassedTensor
from tests.proof.causes.passing.passes import (
    CLASSES,
    Change,
    evidence_of_passes,
    one_device,
    part,
    passed_on,
)


def told(change: Change, reference: Reference | None = None, **mesh: int) -> tuple[str, str, str]:
    reference = reference or one_device()
    ranks = [passed_on(reference, rank, change) for rank in range(2)]
    evidence = evidence_of_passes(reference, ranks, mesh=mesh or {"dp": 2})
    finding = explain_passing(evidence, 0, backward=False)
    assert finding is not None
    return finding.factor, finding.tensor, finding.axis


def _changed(name: str, change: Change) -> Change:
    return lambda rank, one: change(rank, one) if one.name == name else one.values


def test_a_factor_is_a_degree_only_of_ranks_with_copies() -> None:
    doubled = _changed("last", lambda _, one: 2 * one.values)
    assert told(doubled, tp=2) == ("tp", "last", "tp")

    def own_rows(rank: int, one: PassedTensor) -> torch.Tensor:
        return part(one.values * (2 if one.name == "last" else 1), rank, 0)

    assert told(own_rows, dp=2) == ("multiplier", "last", "")


@pytest.mark.parametrize("weight", [0.5, 2.0, 3.0])
def test_a_term_of_a_sum_may_be_multiplied(weight: float) -> None:
    reference = one_device()
    passed = {one.name: one for one in reference.passed.tensors if not one.gradient}
    both = passed["first"].values + passed["second"].values
    reference.passed.tensors.insert(4, replace(passed["last"], name="last (input)", values=both))
    wrong = passed["first"].values + weight * passed["second"].values
    found = told(_changed("last (input)", lambda *_: wrong), reference)
    assert found == ("multiplier", "last (input)", "")


def test_other_zeros_are_another_dropout_mask() -> None:
    reference = one_device()
    kept = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) > 1 / 2
    right = next(n for n, one in enumerate(reference.passed.tensors) if one.name == "last")
    whole = reference.passed.tensors[right]
    reference.passed.tensors[right] = replace(whole, values=whole.values * kept)
    found = told(_changed("last", lambda *_: whole.values * kept.flip(0)), reference)
    assert found == ("dropout mask", "last", "")


def _of_table(rows: torch.Tensor) -> Change:
    table = one_device().initial["last.weight"]
    return _changed("last", lambda *_: table[rows])


@pytest.mark.parametrize(
    ("seen", "right", "factor"),
    [
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], "positions not reset"),
        ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], "positions of a part"),
        ([0, 5, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], "other rows"),
    ],
)
def test_rows_of_a_table_tell_positions(seen: list[int], right: list[int], factor: str) -> None:
    reference = one_device()
    place = next(n for n, one in enumerate(reference.passed.tensors) if one.name == "last")
    values = reference.initial["last.weight"][torch.tensor(right)]
    whole: PassedTensor = replace(reference.passed.tensors[place], values=values)
    reference.passed.tensors[place] = whole
    assert told(_of_table(torch.tensor(seen)), reference)[:2] == (factor, "last")
