"""Sums of rows for each token: in their order, in float32, rounded once; on a CPU and on shapes."""

from __future__ import annotations

import pytest
import torch

from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.expert_kernels import row_sums

COUNTS = (2, 0, 3, 1, 8, 0, 0, 2, 0)
"""Rows of each token: of the last, too, there may be none."""
WIDTH = 200
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rows_of_tokens(
    dtype: torch.dtype, device: torch.device, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of which some belong to no token, their order, and where each token starts."""
    generator = torch.Generator().manual_seed(11)
    rows = sum(COUNTS) + 3
    # Sizes far apart: another order, or a sum in fewer digits, has other bits.
    sizes = 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
    made = (torch.randn(rows, width, generator=generator) * sizes).to(dtype)
    order = torch.randperm(rows, generator=generator)[: sum(COUNTS)]
    starts = torch.tensor([0, *COUNTS[:-1]]).cumsum(0)
    return made.to(device), order.to(device), starts.to(device)


def one_after_the_other(
    rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor
) -> torch.Tensor:
    """Return the sums by additions of one row at a time in at least float32, rounded once."""
    return _unrounded(rows_RD, order_S, starts_n).to(rows_RD.dtype)


def _unrounded(
    rows_RD: torch.Tensor, order_S: torch.Tensor, starts_n: torch.Tensor
) -> torch.Tensor:
    wide = at_least_fp32(rows_RD.dtype)
    made = rows_RD.new_zeros((len(starts_n), rows_RD.shape[1]), dtype=wide)
    ends = [*starts_n.tolist()[1:], len(order_S)]
    for token, (start, end) in enumerate(zip(starts_n.tolist(), ends, strict=True)):
        for row in order_S[start:end].tolist():
            made[token] += rows_RD[row].to(wide)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_added_in_their_order_and_rounded_once(dtype: torch.dtype) -> None:
    given = rows_of_tokens(dtype, torch.device("cpu"))
    made, wanted = row_sums(*given), one_after_the_other(*given)
    if dtype == torch.bfloat16:  # of a number in the middle of two PyTorch takes the other one here
        exact = _unrounded(*given)
        middle = (made.float() - exact).abs() == (wanted.float() - exact).abs()
        assert bool((middle | (made == wanted)).all())
    else:
        assert torch.equal(made, wanted)
    assert not made[1].any()
    backwards = one_after_the_other(given[0], given[1].flip(0), given[2])
    assert not torch.equal(made, backwards)


def test_on_shapes_there_is_one_row_for_each_token() -> None:
    given = [one.to("meta") for one in rows_of_tokens(torch.bfloat16, torch.device("cpu"))]
    made = row_sums(*given)
    assert made.is_meta
    assert (made.shape, made.dtype) == ((len(COUNTS), WIDTH), torch.bfloat16)
