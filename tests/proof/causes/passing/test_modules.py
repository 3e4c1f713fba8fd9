"""The first wrong module of a pass is named, and how it is wrong; right ones are not."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.passing.modules import explain_passing
from echelon.proof.evidence.captured import Reference
from echelon.proof.evidence.run import PassedTensor
from tests.proof.causes.passing.passes import (
    Change,
    evidence_of_passes,
    one_device,
    part,
    passed_on,
)


def told(
    change: Change, *, axis: str, backward: bool = True, cut: dict[str, int] | None = None
) -> ProofFinding | None:
    reference = one_device()
    ranks = [passed_on(reference, rank, change) for rank in range(2)]
    evidence = evidence_of_passes(reference, ranks, mesh={axis: 2}, cut=cut)
    return explain_passing(evidence, 0, backward=backward)


def gradient_of(reference: Reference, name: str) -> torch.Tensor:
    return next(o.values for o in reference.passed.tensors if o.gradient and o.name == name)


def noise(value: torch.Tensor) -> torch.Tensor:
    made = torch.Generator().manual_seed(11)
    return value * (1 + torch.rand(value.shape, generator=made, dtype=value.dtype))


@pytest.mark.parametrize("backward", [True, False])
def test_what_is_right_is_not_named(backward: bool) -> None:
    assert told(lambda rank, one: part(one.values, rank, 1), axis="cp", backward=backward) is None
    # An output in an order of its own, with right ones after it, is none either.
    moved = told(
        lambda rank, one: one.values.flip(1) if one.name == "second" else one.values,
        axis="tp",
        backward=backward,
    )
    assert moved is None


def test_the_first_wrong_module_is_named_with_the_right_one_before_it() -> None:
    def backward(rank: int, one: PassedTensor) -> torch.Tensor:
        return noise(one.values) if one.gradient and one.name != "last" else one.values

    found = told(backward, axis="tp")
    assert found is not None
    assert (found.tensor, found.factor, found.ranks) == ("second", "none", (0, 1))
    assert found.description.endswith("is the first wrong one; that of last, before it, is right")

    def forward(rank: int, one: PassedTensor) -> torch.Tensor:
        wrong = rank == 1 and one.name != "first" and not one.gradient
        return noise(one.values) if wrong else one.values

    found = told(forward, axis="tp", backward=False)
    assert found is not None
    assert (found.tensor, found.axis, found.ranks) == ("second", "tp", (1,))
    assert "forward: the output of second" in found.description


def change_first(how: Change) -> Change:
    """Return right slices of tokens, but for the gradient of `first`."""

    def change(rank: int, one: PassedTensor) -> torch.Tensor | None:
        return how(rank, one) if one.gradient and one.name == "first" else part(one.values, rank, 1)

    return change


@pytest.mark.parametrize(
    ("how", "factor"),
    [
        (lambda rank, one: part(one.values, rank, 1) * 0, "zero"),
        (lambda rank, one: part(one.values, rank, 1) * 2, "cp"),
        (lambda rank, one: part(one.values, rank, 1).flip(0), "permuted"),
        (lambda rank, one: part(one.values, 1 - rank, 1), "shards permuted"),
        (lambda rank, one: part(one.values, rank, 1) * torch.nan, "not finite"),
    ],
)
def test_a_wrong_gradient_has_a_name_and_the_axis_that_it_crosses(how: Change, factor: str) -> None:
    found = told(change_first(how), axis="cp")
    assert found is not None
    assert (found.tensor, found.factor) == ("first", factor)
    assert found.axis == ("cp" if factor not in ("zero", "not finite") else "")


def test_copies_that_add_up_are_a_missing_sum() -> None:
    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        if not one.gradient or one.name == "last":
            return one.values
        share = torch.linspace(0.1, 0.9, one.values.shape[-1], dtype=one.values.dtype)
        return one.values * (share if rank else 1 - share)

    found = told(change, axis="tp")
    assert found is not None
    assert (found.tensor, found.factor, found.axis) == ("second", "missing sum", "tp")


def test_a_sum_that_is_made_later_is_not_missing() -> None:
    """Outputs of `second` are parts of sums on both ranks; what is behind them is right or not."""

    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        share = torch.linspace(0.1, 0.9, one.values.shape[-1], dtype=one.values.dtype)
        partial = one.values * (share if rank else 1 - share)
        if one.gradient:
            return one.values
        values = {"second": partial, "last": noise(one.values)}
        return values.get(one.name, one.values)

    found = told(change, axis="tp", backward=False)
    assert found is not None
    assert (found.tensor, found.factor, found.axis) == ("second", "missing sum", "tp")
    summed = told(
        lambda rank, one: change(rank, one) if one.name == "second" else one.values,
        axis="tp",
        backward=False,
    )
    assert summed is None


@pytest.mark.parametrize("dim", [0, None])
def test_what_columns_of_other_ranks_send_back_is_missed(dim: int | None) -> None:
    """With sequence parallelism the partial sums of a rank are never seen whole."""
    reference = one_device()
    weight = reference.initial["second.weight"]
    entering = gradient_of(reference, "second")

    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        if one.name == "second":
            return part(one.values, rank, -1)
        if not one.gradient or one.name != "first":
            return part(one.values, rank, 1)
        return part(part(entering, rank, -1) @ part(weight, rank, 0), rank, 1)

    found = told(change, axis="tp", cut={"second.weight": 0} if dim == 0 else None)
    assert found is not None
    assert found.tensor == "first"
    # Without the slices of the weight it is another function: no cause is made up.
    assert (found.factor, found.axis) == (("missing sum", "tp") if dim == 0 else ("none", ""))


@pytest.mark.parametrize("lacks", [True, False])
def test_logits_without_the_softmax_denominator(lacks: bool) -> None:
    reference = one_device()
    logits = next(o.values for o in reference.passed.tensors if o.name == "last")
    share = torch.linspace(-1, 1, logits.shape[0] * logits.shape[1], dtype=logits.dtype)
    term = logits.softmax(-1) * share.reshape(*logits.shape[:2], 1)

    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        if one.gradient and one.name == "last":
            return one.values + (term if lacks else term.square())
        return noise(one.values) if one.gradient else one.values

    found = told(change, axis="tp")
    assert found is not None
    assert (found.tensor, found.factor) == ("last", "missing softmax term" if lacks else "none")
