"""The plain kernel: its memory is that of a block, and blocks change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.core.attention_mask import Band
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.models.attention import plain
from echelon.models.attention.interface import SavedAttention, ScoreRule
from echelon.models.attention.plain import PlainKernel


class Largest(TorchDispatchMode):
    """Note the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return found


def _tensors(length: int, heads: tuple[int, int] = (2, 1)) -> list[torch.Tensor]:
    torch.manual_seed(7)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(length, 2, count, 8, dtype=torch.float64) for count in counts]


@pytest.mark.quick("None-band0", "2.0-band2")
@pytest.mark.parametrize("band", [Band(None, None), Band(0, None), Band(0, 40)])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_memory_is_that_of_a_block(band: Band, soft_cap: float | None) -> None:
    q, k, v, dout = _tensors(512)
    scores = ScoreRule(band=band, scale=0.3, soft_cap=soft_cap)
    wanted = PlainKernel().forward(q, k, v, scores)
    wanted_gradients = PlainKernel().backward(dout, SavedAttention(q, k, v, *wanted), scores)
    sizes = replace(TRAINING_PIECES, score_columns=64, score_elements=2 * 2 * 64 * 32)
    with Largest() as noted:
        out = PlainKernel(sizes).forward(q, k, v, scores)
        gradients = PlainKernel(sizes).backward(dout, SavedAttention(q, k, v, *out), scores)
    # The inputs are the largest: 512 rows. All scores of one head would be as many again x 16.
    assert noted.numel == q.numel()
    assert q.numel() < 512 * 512
    torch.testing.assert_close(out, wanted, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(tuple(gradients), tuple(wanted_gradients), rtol=0.0, atol=1e-12)


def test_what_is_hidden_is_not_computed() -> None:
    sizes = replace(TRAINING_PIECES, score_columns=16, score_elements=1)
    q, k, *_ = _tensors(64)
    blocks = list(plain._blocks(q, k, ScoreRule(band=Band(0, None), scale=1.0), sizes))
    assert len(blocks) == 4 * 5 // 2
    window = list(plain._blocks(q, k, ScoreRule(band=Band(0, 1), scale=1.0), sizes))
    assert [(b.num_queries, b.num_keys) for b in window[1:3]] == [(1, 1), (16, 16)]
    assert len(window) == 4 + 3
