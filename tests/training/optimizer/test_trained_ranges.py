"""Which elements of a slice are trained, in which calls, and what one call reads and writes."""

from __future__ import annotations

import pytest
import torch

from echelon.models.piece_sizes import PieceSizes
from echelon.parallel.storage.buckets import Bucket
from echelon.training.optimizer.trained_ranges import (
    FusedOperands,
    UpdateSlices,
    fused_calls,
    scale_gradient,
    trained_ranges,
    update_elements,
)
from tests.parallel.buckets import by_hand, matrix


def make(*frozen: str) -> Bucket:
    """Return a bucket of matrices a (0-6), b (6-10), vectors c (10-13), d (13-15), 3 of padding."""
    parameters = {"a": matrix(2, 3), "b": matrix(2, 2), "c": matrix(3), "d": matrix(2)}
    (bucket,) = by_hand(parameters, [list(parameters)], padding=3)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return bucket


@pytest.mark.parametrize(
    ("frozen", "own", "expected"),
    [
        ("", slice(0, 18), [(0, 10, True), (10, 15, False)]),
        ("", slice(6, 12), [(0, 4, True), (4, 6, False)]),
        ("", slice(12, 18), [(0, 3, False)]),  # not the padding
        ("", slice(15, 18), []),
        ("a", slice(0, 18), [(6, 10, True), (10, 15, False)]),
        ("bc", slice(0, 18), [(0, 6, True), (13, 15, False)]),
        ("bd", slice(4, 12), [(0, 2, True), (6, 8, False)]),
        ("abcd", slice(0, 18), []),
    ],
)
def test_padding_and_frozen_parameters_are_not_trained(
    frozen: str, own: slice, expected: list[tuple[int, int, bool]]
) -> None:
    bucket = make(*frozen)
    bucket.own = own
    found = trained_ranges(bucket)
    assert [(part.start, part.stop, decays) for part, decays in found] == expected


def test_a_call_takes_all_that_decays_or_one_short_piece() -> None:
    parts = [(slice(0, 10), True), (slice(10, 15), False), (slice(20, 24), True)]
    assert list(fused_calls(parts, None)) == [
        ([slice(0, 10), slice(20, 24)], True),
        ([slice(10, 15)], False),
    ]
    assert list(fused_calls(parts, 4)) == [
        *(([piece], True) for piece in (slice(0, 4), slice(4, 8), slice(8, 10), slice(20, 24))),
        *(([piece], False) for piece in (slice(10, 14), slice(14, 15))),
    ]
    assert list(fused_calls([], None)) == []


def test_a_gradient_is_scaled_where_it_lies_unless_it_is_cast() -> None:
    gradient = torch.tensor([1.0, 2.0])
    assert scale_gradient(gradient, 1.0, torch.float32) is gradient
    assert scale_gradient(gradient, 0.5, torch.float32) is gradient
    assert gradient.tolist() == [0.5, 1.0]
    wide = scale_gradient(gradient, 4.0, torch.float64)
    assert (wide.dtype, wide.tolist()) == (torch.float64, [2.0, 4.0])
    assert gradient.tolist() == [0.5, 1.0]


class Subtract:
    """Subtract the gradient and ten times the decay; count in the state; note each call."""

    def __init__(self) -> None:
        """Begin without calls."""
        self.calls: list[list[int]] = []

    def start_update(self, count: int) -> None:
        """Ignore the number."""

    def update(self, operands: FusedOperands) -> None:
        """Update in place."""
        self.calls.append([target.numel() for target in operands.targets])
        (counts,) = operands.state
        assert operands.rate == 0.25
        for target, gradient, count in zip(
            operands.targets, operands.gradients, counts, strict=True
        ):
            target.sub_(gradient + 10 * operands.weight_decay)
            count.add_(1)


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("master", [False, True])
def test_values_follow_what_is_updated(master: bool, scratch: bool) -> None:
    values = torch.full((8,), 1.0, dtype=torch.bfloat16 if master else torch.float32)
    target = torch.full((8,), 2.0) if master else values
    state, rule = torch.zeros(8), Subtract()
    slices = UpdateSlices(
        gradient=torch.arange(8.0),
        values=values,
        target=target,
        state=[state],
        scratch=scratch,
        pieces=PieceSizes(update_elements=2),
    )
    parts = [(slice(0, 3), True), (slice(4, 6), False)]
    update_elements(rule, slices, parts, rate=0.25, factor=0.5, weight_decay=0.1)
    # Elements 3, 6 and 7 are not trained.
    first = 2.0 if master else 1.0
    taken = torch.tensor([1.0, 1.5, 2.0, 0.0, 2.0, 2.5, 0.0, 0.0])
    torch.testing.assert_close(target.float(), first - taken)
    assert state.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert rule.calls == ([[2], [1], [2]] if master else [[3], [2]])
    written = target.to(values.dtype)
    if master and not scratch:
        for untrained in (3, 6, 7):
            written[untrained] = 1.0  # where the values are the parameters, those keep theirs
    assert torch.equal(values, written)
