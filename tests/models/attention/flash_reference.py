"""What flash attention computes of the very arguments of its calls, in plain products.

It takes the place of the kernel of a GPU in tests: offsets, lengths, sides of a window and the
layout of the log-sum-exp are read here as the kernel's documentation says, and each is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from echelon.models.attention.flash import FlashArguments, FlashAttention, Gradients

Tensors = tuple[torch.Tensor, ...]


class ReferenceFlash(FlashAttention):
    """Compute each segment by itself; count the calls."""

    def __init__(self, *, strict: bool = True) -> None:
        """Begin with no call; who is not `strict` takes lengths as they come, as a kernel does."""
        self._strict = strict
        self.calls: list[FlashArguments] = []
        self.segments = 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, told: FlashArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out, and lse [B, H, T] or, of segments, [H, R]."""
        self.calls.append(told)
        out = torch.empty_like(q)
        dense = told.starts_q is None
        shape = (q.shape[0], q.shape[2], q.shape[1]) if dense else (q.shape[1], q.shape[0])
        lse = torch.full(shape, torch.nan, dtype=q.dtype)
        for at_q, at_k in segments(q, k, told, strict=self._strict):
            self.segments += 1
            scores_HTS = visible_scores(q[at_q], k[at_k], told)
            lse_HT = scores_HTS.logsumexp(-1)
            weights_HTS = (scores_HTS - lse_HT[..., None]).exp()
            out[at_q] = torch.einsum("hts,shd->thd", weights_HTS, repeated(v[at_k], q))
            lse_of(lse, at_q)[...] = lse_HT
        return out, lse

    def backward(
        self, dout: torch.Tensor, inputs: Tensors, outputs: Tensors, told: FlashArguments
    ) -> Gradients:
        """Return the gradients, with the weights that the log-sum-exp says."""
        self.calls.append(told)
        q, k, v = inputs
        out, lse = outputs
        assert lse.is_contiguous()
        dq, dk, dv = (torch.zeros_like(x) for x in inputs)
        for at_q, at_k in segments(q, k, told, strict=self._strict):
            self.segments += 1
            keys, values = repeated(k[at_k], q), repeated(v[at_k], q)
            scores_HTS = visible_scores(q[at_q], k[at_k], told)
            weights_HTS = (scores_HTS - lse_of(lse, at_q)[..., None]).exp()
            delta_HT1 = (dout[at_q] * out[at_q]).sum(-1).t()[..., None]
            products = torch.einsum("thd,shd->hts", dout[at_q], values)
            ds_HTS = weights_HTS * (products - delta_HT1) * told.scale
            dq[at_q] = torch.einsum("hts,shd->thd", ds_HTS, keys)
            of_keys = torch.einsum("hts,thd->shd", ds_HTS, q[at_q])
            of_values = torch.einsum("hts,thd->shd", weights_HTS, dout[at_q])
            dk[at_k] = of_keys.unflatten(1, (k.shape[-2], -1)).sum(2)
            dv[at_k] = of_values.unflatten(1, (k.shape[-2], -1)).sum(2)
        return dq, dk, dv


Place = tuple[int, slice] | slice
"""Rows of one sequence of a batch, or of one segment."""


def segments(
    q: torch.Tensor, k: torch.Tensor, told: FlashArguments, *, strict: bool
) -> Iterator[tuple[Place, Place]]:
    """Yield where each segment is in queries and keys; the arguments fit the tensors."""
    assert q.stride(-1) == k.stride(-1) == 1
    if told.starts_q is None or told.starts_k is None:
        assert told.starts_q is told.starts_k
        assert (told.most_q, told.most_k) == (q.shape[1], k.shape[1])
        yield from (((b, slice(None)), (b, slice(None))) for b in range(q.shape[0]))
        return
    found: list[list[slice]] = []
    for x, starts, most in ((q, told.starts_q, told.most_q), (k, told.starts_k, told.most_k)):
        assert x.dim() == 3
        assert starts.dtype == torch.int32
        ends = starts.tolist()
        assert (ends[0], ends[-1]) == (0, len(x)), "all rows are in segments"
        found.append([slice(a, b) for a, b in itertools.pairwise(ends)])
        lengths = [one.stop - one.start for one in found[-1]]
        if strict:
            assert min(lengths) > 0
            assert max(lengths) == most
    yield from (pair for pair in zip(*found, strict=True) if pair[0].stop > pair[0].start)


def visible_scores(q: torch.Tensor, k: torch.Tensor, told: FlashArguments) -> torch.Tensor:
    """Return the scores of a segment, [H, T, S], -inf where the window hides them."""
    scores_HTS = torch.einsum("thd,shd->hts", q, repeated(k, q)) * told.scale
    own_T1 = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys_S = torch.arange(len(k))
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    right = 0 if told.causal else told.right
    if told.left >= 0:
        hidden |= keys_S < own_T1 - told.left
    if right >= 0:
        hidden |= keys_S > own_T1 + right
    return scores_HTS.masked_fill(hidden, float("-inf"))


def repeated(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return keys with each head as often as query heads meet it."""
    return k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)


def lse_of(lse: torch.Tensor, at_q: Place) -> torch.Tensor:
    """Return the log-sum-exp of a segment, [H, T]."""
    return lse[:, at_q] if isinstance(at_q, slice) else lse[at_q[0]]
