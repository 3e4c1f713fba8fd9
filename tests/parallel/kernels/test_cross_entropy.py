"""Both passes over logits, alone and as if a rank had half of the columns."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as fn

from echelon.core.piece_sizes import PROOF_PIECES
from echelon.parallel.kernels.cross_entropy import (
    LabelRows,
    RowStatistics,
    overwrite_with_gradient,
    row_statistics,
)

TOKENS, VOCAB = 7, 60
FACTOR = 0.25
FP16_STEP = 2.0**-24
"""The smallest number in fp16."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2**-10}


def logits(dtype: torch.dtype) -> torch.Tensor:
    """Return logits; in the last row all but one are far away."""
    values = torch.randn((TOKENS, VOCAB), generator=torch.Generator().manual_seed(3)) * 3
    values[-1] -= 200.0
    values[-1, 11] = 0.0
    return values.to(dtype)


LABELS = torch.tensor([0, 11, 59, 29, 30, 5, 11])
COUNTED = torch.tensor([True] * 5 + [False, True])


def labels(columns: slice) -> LabelRows:
    """Return which of the labels are among some columns, and where."""
    mine = (columns.start <= LABELS) & (columns.stop > LABELS)
    local = (LABELS - columns.start).masked_fill(~mine, 0)
    return LabelRows(local_C=local, mine_C=mine & COUNTED, counted_C=COUNTED)


def merged(parts: list[torch.Tensor], mine: list[LabelRows]) -> list[RowStatistics]:
    """Return the numbers of whole rows as each part of the columns sees them."""
    if len(parts) == 1:
        maximum, total, target = parts[0]
        return [
            RowStatistics(
                maximum_C=maximum, total_C=total, target_C=target, local_maximum_C=maximum
            )
        ]
    maximum = torch.stack([part[0] for part in parts]).amax(0)
    total = torch.stack([part[1] * (part[0] - maximum).exp() for part in parts]).sum(0)
    targets = [part[2] * one.mine_C for part, one in zip(parts, mine, strict=True)]
    target = torch.stack(targets).sum(0)
    return [
        RowStatistics(maximum_C=maximum, total_C=total, target_C=target, local_maximum_C=part[0])
        for part in parts
    ]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("cuts", [(0, 60), (0, 30, 60)], ids=["whole", "halves"])
def test_loss_and_gradient_are_those_of_plain_pytorch(
    cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    exact = logits(dtype).double().requires_grad_()
    losses = fn.cross_entropy(exact, LABELS, reduction="none")
    (losses * COUNTED).sum().mul(FACTOR).backward()
    columns = [slice(start, end) for start, end in pairwise(cuts)]
    parts = [logits(dtype)[:, one].contiguous() for one in columns]
    mine = [labels(one) for one in columns]
    local = [
        row_statistics(part, one.local_C, PROOF_PIECES)
        for part, one in zip(parts, mine, strict=True)
    ]
    statistics = merged(local, mine)
    factor_C = COUNTED * torch.tensor(FACTOR)
    wide = 1e-12 if dtype == torch.float64 else 1e-5
    for part, one, numbers in zip(parts, mine, statistics, strict=True):
        left = overwrite_with_gradient(part, numbers, one, factor_C, PROOF_PIECES)
        assert (left is None) == (dtype in (torch.bfloat16, torch.float16))
        if left is not None:
            part.mul_(left.unsqueeze(1))
        own = numbers.log_sum_C - numbers.target_C
        torch.testing.assert_close(
            own[COUNTED].double(), losses.detach()[COUNTED], rtol=wide, atol=wide
        )
    assert exact.grad is not None
    got = torch.cat(parts, dim=1).double()
    assert not got[~COUNTED].any()
    # Beside its one rounding, what float32 (or float64) loses of softmax - 1 in the label's column.
    least = {torch.float64: 1e-12, torch.float16: FP16_STEP + 1e-7}.get(dtype, 1e-7)
    assert ((got - exact.grad).abs() <= BOUNDS[dtype] * exact.grad.abs() + least).all()


def test_a_rank_without_columns_of_its_own_adds_nothing() -> None:
    part = torch.full((TOKENS, 4), float("-inf"))
    maximum, total, _ = row_statistics(part, torch.zeros(TOKENS, dtype=torch.long), PROOF_PIECES)
    assert maximum.isfinite().all()
    assert not total.any()
