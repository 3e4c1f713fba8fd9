"""Kernels that only a GPU runs, beside plain ones: documents, gradients and sums of experts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn import functional as fn

from echelon.core.attention_mask import AttentionMask, DocumentStarts, PositionRun
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.local import AttentionRule, LocalAttention
from echelon.parallel.kernels.expert_kernels import add_grouped_gradient, row_sums
from tests.parallel.kernels.test_expert_kernels import assert_sums, exact, given
from tests.parallel.kernels.test_expert_kernels_row_sums import (
    one_after_the_other,
    rows_of_tokens,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]
CUDA = torch.device("cuda")
LENGTH = 512
BATCHES: dict[str, DocumentStarts] = {
    "one sequence": ((0, 30, 256),),
    "the same in each": ((0, 30, 256),) * 3,
    "others in each": ((0, 30, 256), (0, 1, 2, 300), (0,)),
}
MASKS = {"causal": AttentionMask(), "a window": AttentionMask(window=50)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("in_qkv", [False, True])
def test_documents_of_a_batch_are_attention(mask: str, batch: str, in_qkv: bool) -> None:
    starts, run = BATCHES[batch], (PositionRun(0, 1, LENGTH),)
    generator = torch.Generator().manual_seed(8)
    made = torch.randn(LENGTH, len(starts), 16, 64, generator=generator).to(CUDA, torch.bfloat16)
    parts = [x if in_qkv else x.contiguous() for x in made.split((8, 4, 4), dim=2)]
    dout = torch.randn(LENGTH, len(starts), 8, 64, generator=generator).to(CUDA, torch.bfloat16)

    def attended(dtype: torch.dtype, kernel: Any, tile_rows: int | None) -> list[torch.Tensor]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in parts)
        tiles = tiles_between(run, run, MASKS[mask], starts, tile_rows)
        out = LocalAttention.apply(q, k, v, tiles, AttentionRule(kernel=kernel))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype))]

    found = attended(torch.bfloat16, "flash", None)
    for got, wanted in zip(found, attended(torch.float64, "plain", 64), strict=True):
        # Rounding of bf16: weights, outputs and their gradients, each by 2^-9 of what is there.
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert float(error) < 2e-2


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_expert_gets_the_sum_of_its_rows(dtype: torch.dtype, fresh: bool) -> None:
    sums, dy, x, ends, _ = given(torch.bfloat16, CUDA)
    sums = sums.to(dtype)
    wanted, sizes = exact(sums.cpu(), dy.cpu(), x.cpu(), fresh)
    again = sums.clone()
    for made in (sums, again):
        add_grouped_gradient(made, dy, x, ends, fresh=fresh)
    assert_sums(sums.cpu(), wanted, sizes)
    assert torch.equal(sums, again), "the same bits on every run"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_token_are_added_as_pytorch_adds_them(dtype: torch.dtype) -> None:
    rows, order, starts = rows_of_tokens(dtype, CUDA)
    made = row_sums(rows, order, starts)
    assert torch.equal(made, fn.embedding_bag(order, rows, starts, mode="sum"))
    assert torch.equal(made, row_sums(rows, order, starts))
    assert torch.equal(made, one_after_the_other(rows, order, starts))
