"""The fused kernels of a GPU against the reference; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from echelon.layout import attention_tiles as boxes
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention.interface import SavedAttention
from echelon.models.attention.local import attend_tiles, backward_tiles
from tests.models.attention.cases import MASKS, RUNS, case, expected

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let windows of a few keys be tiled: full boxes between two edges too."""
    monkeypatch.setattr(boxes, "MIN_MIDDLE_TILES", 1)
    tiles_between.cache_clear()
    yield
    tiles_between.cache_clear()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-2),  # TF32 products, where they are allowed
        (torch.bfloat16, 6e-2),
        (torch.float16, 1e-2),
    ],
)
def test_pieces_are_the_reference(
    dtype: torch.dtype, tolerance: float, heads: tuple[int, int]
) -> None:
    for runs in RUNS:
        for mask in MASKS:
            one = case(runs, mask, heads, dtype)
            q, k, v, dout = (x.cuda() for x in (one.q, one.k, one.v, one.dout))
            out, lse = attend_tiles(q, k, v, one.pieces).result()
            gradients = backward_tiles(dout, SavedAttention(q, k, v, out, lse), one.pieces)
            for x, want in zip((out, lse, *gradients), expected(one), strict=True):
                torch.testing.assert_close(x.cpu().double(), want, rtol=tolerance, atol=tolerance)
