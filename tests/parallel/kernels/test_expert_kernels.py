"""Gradients of the matrices of all experts: on a CPU and on shapes."""

from __future__ import annotations

import pytest
import torch

from echelon.parallel.kernels.expert_kernels import add_grouped_gradient, adds_grouped_gradients

COUNTS = (0, 70, 0, 3, 130)
TAIL = 9
OUTPUTS, INPUTS, GAP = 152, 40, 7000
CPU = torch.device("cpu")


def given(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return sums with something between them, rows, and their ends; the last have no expert."""
    generator = torch.Generator().manual_seed(5)
    rows = sum(COUNTS) + TAIL
    dy, x = (torch.randn(rows, n, generator=generator).to(dtype) for n in (OUTPUTS, INPUTS))
    dy[-TAIL:] = torch.nan
    flat = torch.full((len(COUNTS) * GAP,), 5.0, device=device)
    sums = flat.as_strided((len(COUNTS), OUTPUTS, INPUTS), (GAP, INPUTS, 1))
    sums.copy_(torch.randn(sums.shape, generator=generator))
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    return sums, dy.to(device), x.to(device), ends.to(device), flat


def exact(
    sums: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums in float64, and the sums of the sizes of all that is added."""
    parts = list(
        zip(dy.double()[:-TAIL].split(COUNTS), x.double()[:-TAIL].split(COUNTS), strict=True)
    )
    made = torch.stack([a.t() @ b for a, b in parts])
    sizes = torch.stack([a.abs().t() @ b.abs() for a, b in parts])
    before = torch.zeros_like(made) if fresh else sums.double()
    return before + made, before.abs() + sizes


def assert_sums(got: torch.Tensor, wanted: torch.Tensor, sizes: torch.Tensor) -> None:
    # Each of at most 131 additions in float32 rounds by 2^-24 of what is there; then the sum does.
    once = torch.finfo(got.dtype).eps / 2
    bound = (1 + once) * (max(COUNTS) + 1) * 2.0**-24 * sizes + once * wanted.abs()
    assert bool(((got.double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_expert_gets_the_sum_of_its_rows(dtype: torch.dtype, fresh: bool) -> None:
    sums, dy, x, ends, flat = given(dtype, CPU)
    wanted, sizes = exact(sums, dy, x, fresh)
    add_grouped_gradient(sums, dy, x, ends, fresh=fresh)
    assert_sums(sums, wanted, sizes)
    between = flat.as_strided((len(COUNTS), GAP - OUTPUTS * INPUTS), (GAP, 1), OUTPUTS * INPUTS)
    assert bool((between == 5.0).all())


def test_on_shapes_nothing_is_made() -> None:
    sums, dy, x, ends, _ = given(torch.bfloat16, CPU)
    meta = [one.to("meta") for one in (sums, dy, x, ends)]
    add_grouped_gradient(*meta, fresh=False)
    assert adds_grouped_gradients(meta[1])
    assert adds_grouped_gradients(dy)
