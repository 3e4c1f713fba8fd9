"""The merge of log-sum-exps: exact for scores of any size, and where nothing was met."""

from __future__ import annotations

import torch
from torch import nn

from echelon.core.attention_mask import Band
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.attention.interface import HeadSinks, OnlineSoftmax

ROWS = AttentionTile(slice(0, 3), slice(0, 5), Band(None, None))
LAST = AttentionTile(slice(2, 3), slice(0, 5), Band(None, None), sequence=1)


def _softmax(scores_BHTS: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.einsum("bhts,sd->tbhd", scores_BHTS.softmax(-1), v), scores_BHTS.logsumexp(-1)


def _merge_in_two(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    merged = OnlineSoftmax(torch.Size((3, 2, 2, 4)), scores.dtype, scores.device)
    merged.add(ROWS, *_softmax(scores[..., :5], v[:5]))
    merged.add(ROWS, *_softmax(scores[..., 5:], v[5:]))
    return merged.result()


def test_scores_far_apart_merge_exactly() -> None:
    torch.manual_seed(1)
    scores, v = torch.randn(2, 2, 3, 10).double(), torch.randn(10, 4).double()
    for shift in (0.0, 3.0, 700.0, -700.0, 1e5, -1e5):
        far = scores.clone()
        far[..., 5:] += shift
        torch.testing.assert_close(_merge_in_two(far, v), _softmax(far, v), rtol=1e-14, atol=1e-14)


def test_rows_of_one_sequence_are_merged_alone() -> None:
    torch.manual_seed(2)
    scores, v = torch.randn(2, 2, 3, 10).double(), torch.randn(10, 4).double()
    merged = OnlineSoftmax(torch.Size((3, 2, 2, 4)), scores.dtype, scores.device)
    out, lse = _softmax(scores[..., 5:], v[5:])
    merged.add(LAST, out[2:, 1:], lse[1:, :, 2:])
    merged.add(ROWS, *_softmax(scores[..., :5], v[:5]))
    found, found_lse = merged.result()
    whole, whole_lse = _softmax(scores, v)
    first, first_lse = _softmax(scores[..., :5], v[:5])
    torch.testing.assert_close(found[2, 1], whole[2, 1])
    torch.testing.assert_close(found_lse[1, :, 2], whole_lse[1, :, 2])
    torch.testing.assert_close(found[:2], first[:2])
    torch.testing.assert_close(found_lse[0], first_lse[0])


def test_a_row_that_met_nothing_twice_is_no_nan() -> None:
    merged = OnlineSoftmax(torch.Size((3, 2, 2, 4)), torch.float32, torch.device("cpu"))
    nothing = torch.zeros(3, 2, 2, 4), torch.full((2, 2, 3), float("-inf"))
    merged.add(LAST, nothing[0][2:, 1:], nothing[1][1:, :, 2:])
    merged.add(ROWS, *nothing)
    out, lse = merged.result()
    assert not out.any()
    assert bool((lse == float("-inf")).all())


def test_a_narrow_first_output_is_widened_before_more_is_merged() -> None:
    merged = OnlineSoftmax(torch.Size((3, 2, 2, 4)), torch.bfloat16, torch.device("cpu"))
    big, small = torch.full((3, 2, 2, 4), 256.0), torch.full((3, 2, 2, 4), 1.0)
    lse = torch.zeros(2, 2, 3)
    merged.add(ROWS, big.bfloat16(), lse.clone())
    for _ in range(3):
        # Each adds a weight of 1 / 256 or so: in bfloat16 the sum would stay 256.
        merged.add(ROWS, small.bfloat16(), lse - 5.545177)
    out, _ = merged.result()
    torch.testing.assert_close(out.float(), torch.full_like(big, 253.0), rtol=0.0, atol=1.0)
    assert out.dtype == torch.bfloat16


def test_heads_elsewhere_get_no_gradient_from_here() -> None:
    generator = torch.Generator().manual_seed(2)
    out, dout = (torch.randn(5, 2, 2, 3, generator=generator).double() for _ in range(2))
    lse = torch.randn(2, 2, 5, generator=generator).double()
    weight = nn.Parameter(torch.tensor([9.0, -1.0, 0.5, 9.0], dtype=torch.float64))
    found: list[torch.Tensor] = []
    sinks = HeadSinks(weight=weight, add=lambda _, one: found.append(one), heads=slice(1, 3))
    assert torch.equal(sinks.values_H, weight[1:3])
    sinks.backward(dout, out, lse)
    shares = (weight.detach()[None, 1:3, None] - lse).exp()
    pull = (dout * out).sum(-1).permute(1, 2, 0)
    wanted = -(shares * pull).sum((0, 2))
    torch.testing.assert_close(found[0], torch.tensor([0.0, *wanted.tolist(), 0.0]).double())
