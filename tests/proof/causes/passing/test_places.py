"""What ranks pass is found in what one device does, as slices, parts and partial sums."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.proof.causes.passing.places import PassedStep, cut_axes, cuts_of, sliced
from echelon.proof.evidence.run import PassedTensor
from tests.proof.causes.passing.passes import (
    Change,
    evidence_of_passes,
    one_device,
    part,
    passed_on,
)


def compared(change: Change, **mesh: int) -> PassedStep:
    reference = one_device()
    ranks = [passed_on(reference, rank, change) for rank in range(2)]
    return PassedStep(evidence_of_passes(reference, ranks, mesh=mesh), 0)


def test_slices_are_found_and_gradients_may_have_a_factor() -> None:
    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        return part(one.values, rank, 1) * (2.0 if one.gradient else 1.0)

    step = compared(change, cp=2)
    for module in (*step.forward.values(), *step.backward.values()):
        assert not module.wrong
        assert [one.cut for one in module.right] == [((1, range(3)),), ((1, range(3, 6)),)]
    assert {round(one.factor, 9) for one in step.backward["first"].right} == {2.0}
    right = step.forward["last"].right
    assert cut_axes(step.evidence, right, inner=True) == "cp"
    assert torch.equal(sliced(torch.arange(6), ((0, range(4, 6)),)), torch.tensor([4, 5]))
    assert step.sources == {"first": ["second"], "second": ["last"]}


def test_rows_of_replicas_are_no_inner_cut() -> None:
    step = compared(lambda rank, one: part(one.values, rank, 0), dp=2)
    right = step.forward["last"].right
    assert cut_axes(step.evidence, right, inner=True) == ""
    assert cut_axes(step.evidence, right, inner=False) == "dp"


def test_every_second_sequence_is_found() -> None:
    step = compared(lambda rank, one: one.values[rank::2], dp=2)
    assert [one.cut for one in step.forward["last"].right] == [
        *[((0, range(0, 3, 2)),), ((0, range(1, 4, 2)),)],
    ]
    assert step.covers_batch()
    assert {*cuts_of((2, 5), (8, 5))} >= {((0, range(1, 6, 4)),), ((0, range(4, 7, 2)),)}


def test_rows_that_no_rank_has_are_missed() -> None:
    step = compared(lambda _, one: part(one.values, 0, 0), dp=2)
    assert not step.covers_batch()


def test_copies_that_are_alike_are_no_partial_sums() -> None:
    def change(_: int, one: PassedTensor) -> torch.Tensor:
        return one.values * 2 if one.gradient and one.name == "first" else one.values

    step = compared(change, tp=2)
    assert (step.backward["first"].partial, len(step.backward["first"].wrong)) == ((), 2)


def test_what_lies_nowhere_is_not_compared() -> None:
    step = compared(lambda rank, one: one.values.flip(1) + 1, dp=2)
    every = [*step.forward.values(), *step.backward.values()]
    assert [len(one.right) + len(one.wrong) for one in every] == [0] * 7
    odd = compared(lambda rank, one: one.values[:, :4], dp=2)
    assert not any(one.right or one.wrong for one in odd.forward.values())


def test_in_few_digits_right_and_wrong_are_not_told_apart() -> None:
    reference = one_device()
    ranks = [passed_on(reference, rank, lambda _, one: one.values) for rank in range(2)]
    evidence = evidence_of_passes(reference, ranks, mesh={"dp": 2})
    assert PassedStep(replace(evidence, dtype=torch.bfloat16), 0).backward == {}
    assert len(PassedStep(replace(evidence, dtype=torch.float32), 0).backward) == 3


def test_partial_sums_are_told() -> None:
    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        share = torch.full_like(one.values, 0.25)
        share[..., ::2] = 0.75
        partial = one.name == "second" and one.gradient
        return one.values * (share if rank else 1 - share) if partial else one.values

    step = compared(change, tp=2)
    assert step.covers_batch()
    assert step.backward["second"].partial == ("tp",)
    assert step.backward["first"].partial == ()
    assert len(step.backward["first"].right) == 2
