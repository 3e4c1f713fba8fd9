"""Which elements of a slice are trained, in which calls, and what one call reads and writes."""

from __future__ import annotations

import pytest
import torch

from echelon.core.piece_sizes import PieceSizes
from echelon.core.plan import Optimizer
from echelon.parallel.storage.buckets import Bucket
from echelon.rehearsal.order import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly
from echelon.training.optimizer.elementwise import AdamW, MomentumSgd
from echelon.training.optimizer.trained_ranges import (
    ElementRule,
    FusedOperands,
    OnePassRule,
    UpdateSlices,
    fused_calls,
    kernels_for,
    scale_gradient,
    trained_ranges,
    update_elements,
)
from tests.parallel.buckets import by_hand, matrix

LENGTH = 40
PARTS = [(slice(0, 17), True), (slice(20, 38), False)]
RULES: dict[str, type[AdamW] | type[MomentumSgd]] = {"adamw": AdamW, "sgd": MomentumSgd}


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


def updated(
    kind: str,
    gradients: torch.dtype,
    *,
    master: torch.dtype | None = None,
    scratch: bool = False,
    one_pass: bool,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Return values, target and state after an update, the third of all, and the gradient twice:
    as it is then, and as it was."""
    generator = torch.Generator().manual_seed(3)

    def random(dtype: torch.dtype) -> torch.Tensor:
        made = torch.rand(LENGTH, generator=generator).to(dtype)
        return made if device is None else made.to(device)

    values = random(torch.bfloat16 if master else torch.float32)
    target = random(master) if master else values
    state = [random(target.dtype) for _ in range(2 if kind == "adamw" else 1)]
    gradient = random(gradients)
    before = gradient.clone()
    rule: ElementRule = RULES[kind](Optimizer())
    rule.start_update(3)
    slices = UpdateSlices(
        gradient=gradient,
        values=values,
        target=target,
        state=state,
        scratch=scratch,
        pieces=PieceSizes(update_elements=7, gpu_update_elements=7),
        one_pass=one_pass,
    )
    update_elements(rule, slices, PARTS, rate=0.25, factor=0.5, weight_decay=0.1)
    return [values, target, *state, gradient, before]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("master", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("scratch", [False, True])
def test_on_a_cpu_it_is_the_update_of_many_passes(
    kind: str, gradients: torch.dtype, master: torch.dtype | None, scratch: bool
) -> None:
    """But for roundings: PyTorch fuses products and sums in its loops over the vectors of a CPU,
    and not for what elements are left."""
    first, second = (
        updated(kind, gradients, master=master, scratch=scratch, one_pass=one_pass)
        for one_pass in (False, True)
    )
    assert isinstance(RULES[kind](Optimizer()), OnePassRule)
    for one, other in zip(first[:-2], second[:-2], strict=True):
        off = 2.0**-22 if one.dtype == torch.float32 else torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=off, atol=off)
    gradient, before = second[-2:]
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("kind", RULES)
def test_a_rehearsal_counts_one_kernel_and_28_bytes_of_a_weight(kind: str) -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        shapes.task = "update"
        updated(kind, torch.bfloat16, master=torch.float32, one_pass=True, device=META)
    work = shapes.work.by_task["update"]
    name = f"update_{kind}"
    assert work.by_name[name] == len(PARTS)
    moved = 28 if kind == "adamw" else 20  # one state less
    assert work.bytes_by_name[name] == moved * sum(part.stop - part.start for part, _ in PARTS)


def test_kernels_are_for_float32_on_a_gpu() -> None:
    assert kernels_for(torch.zeros(1)) is None
