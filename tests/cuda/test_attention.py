"""cuDNN's kernel, which "auto" takes for squares on Hopper and Blackwell, against float64."""

from __future__ import annotations

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, PositionRun
from echelon.core.choices.kernels import CUDNN_GENERATIONS, AttentionKernel
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.flash import flash_on
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.attention.interface import SavedAttention
from echelon.models.attention.local import (
    AttentionRule,
    attend_tiles,
    backward_tiles,
    kernel_for,
)
from echelon.models.attention.reference import attention_reference

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
    # Where the first product of a process is one of backward, on a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
U = 2.0**-8  # half a step of bf16 around 1, relative: what one rounding may be off


def test_auto_is_cudnn_on_the_generations_where_it_is_faster() -> None:
    device = torch.device("cuda", 0)
    kernel = kernel_for(device, torch.bfloat16, 128)
    assert isinstance(kernel, FusedGpuKernel)
    newer = torch.cuda.get_device_capability(device)[0] in CUDNN_GENERATIONS
    assert kernel.cudnn is (newer and not flash_on(device, "auto").is_third)


@pytest.mark.parametrize("length", [512, 200])
@pytest.mark.parametrize(("heads", "width"), [((8, 8), 64), ((8, 2), 128)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash"])
def test_squares_are_the_reference(
    kernel: AttentionKernel, causal: bool, heads: tuple[int, int], width: int, length: int
) -> None:
    """Probabilities and gradients of scores are rounded to bf16 before their products, as the
    results are: errors are a few roundings of the largest number, whichever kernel it is."""
    torch.manual_seed(5)
    shapes = [(length, 2, count, width) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    run = (PositionRun(0, 1, length),)
    tiles = tiles_between(run, run, AttentionMask(causal=causal), None, None)
    rule = AttentionRule(kernel=kernel)
    out, lse = attend_tiles(q, k, v, tiles, rule).result()
    found = backward_tiles(dout, SavedAttention(q, k, v, out, lse), tiles, rule)
    exact = tuple(x.double().requires_grad_() for x in (q, k, v))
    seen = torch.ones(length, length, dtype=torch.bool, device="cuda")
    wanted, wanted_lse = attention_reference(
        exact[0], exact[1], exact[2], seen.tril() if causal else seen
    )
    gradients = torch.autograd.grad(wanted, exact, dout.double())
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-4)
    for got, right in zip((out, *found), (wanted, *gradients), strict=True):
        assert got.shape == right.shape
        assert (got.double() - right).abs().max() <= 4 * U * right.abs().max()
