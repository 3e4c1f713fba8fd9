"""Kernels that only a GPU runs, beside plain products: documents, and gradients of experts."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, DocumentStarts, PositionRun
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.local import AttentionRule, LocalAttention
from echelon.parallel.kernels.grouped_gradient import add_grouped_gradient
from tests.parallel.kernels.test_grouped_gradient import assert_sums, exact, given

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
@pytest.mark.parametrize("described", [True, False])
def test_each_expert_gets_the_sum_of_its_rows(described: bool, fresh: bool) -> None:
    kernels = import_module("echelon.parallel.kernels.grouped_gradient_triton")
    sums, dy, x, ends, _ = given(torch.bfloat16, CUDA)
    wanted, sizes = exact(sums.cpu(), dy.cpu(), x.cpu(), fresh)
    tile = replace(kernels.HOPPER_TILE, described=described)
    again = sums.clone()
    kernels.add_grouped_gradient(sums, dy, x, ends, fresh=fresh, tile=tile)
    assert_sums(sums.cpu(), wanted, sizes)
    add_grouped_gradient(again, dy, x, ends, fresh=fresh)
    assert_sums(again.cpu(), wanted, sizes)
