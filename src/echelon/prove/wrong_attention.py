"""Attention done wrong on one device: pairs met never or twice, blocks merged without weights.

Shape suffixes: T queries, S keys, B sequences, H heads; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from echelon.core.model_shape import ModelShape
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.prove.context_places import ContextPlaces

Counted = Callable[[torch.Tensor, TokenBatch], torch.Tensor]
"""From what is visible, [T, S] or [B, T, S], to how often each query meets each key."""


class CountedAttention(Operations):
    """Let queries meet keys as often as a mistake says."""

    def __init__(self, counted: Counted, heads: tuple[int, ...] | None = None) -> None:
        """Count by `counted`, for some heads or for all."""
        self.counted, self.heads = counted, heads

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return attention in which a pair that meets twice has twice the weight."""
        seen = seen_by(shape, batch)
        times_BHTS = _by_head(seen, q).to(q.dtype)
        chosen = slice(None) if self.heads is None else list(self.heads)
        times_BHTS[:, chosen] = _by_head(self.counted(seen, batch), q).to(q.dtype)[:, chosen]
        scores_BHTS = _scores(q, k, shape) + times_BHTS.log()
        return _output(_softmax(scores_BHTS), v, q)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Hold attention over one block of keys: out [T,B,H,hd], lse and the top score [T,B,H,1]."""

    out: torch.Tensor
    lse: torch.Tensor
    top: torch.Tensor

    @property
    def met(self) -> torch.Tensor:
        """Return whether a query meets a key of the block."""
        return self.lse.isfinite()


Merge = Callable[[list[Block]], torch.Tensor]
"""From blocks in their order to one output."""


BlockNumbers = Callable[[TokenBatch], torch.Tensor]
"""From a batch to the number of the block in which a query meets a key, [T, S] or [B, T, S]."""


class MergedAttention(Operations):
    """Attend to blocks of keys by themselves, then put the outputs together wrong."""

    def __init__(self, numbers: BlockNumbers, merge: Merge) -> None:
        """Merge with `merge` what the blocks give, in the order of their numbers."""
        self.numbers, self.merge = numbers, merge

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return the outputs of all blocks, put together."""
        scores_BHTS, seen = _scores(q, k, shape), _by_head(seen_by(shape, batch), q)
        numbers = _by_head(self.numbers(batch), q)
        blocks: list[Block] = []
        for number in range(int(numbers.max()) + 1):
            here = seen & (numbers == number)
            block = scores_BHTS.masked_fill(~here, float("-inf"))
            lse, top = (
                x.permute(2, 0, 1).unsqueeze(-1) for x in (block.logsumexp(-1), block.amax(-1))
            )
            out = torch.einsum("bhts,sbhd->tbhd", _softmax(block), _repeated(v, q))
            blocks.append(Block(out=out, lse=lse, top=top))
        return self.merge(blocks).reshape(q.shape[0] * q.shape[1], -1)


def _sum(blocks: list[Block]) -> torch.Tensor:
    return torch.stack([block.out for block in blocks]).sum(0)


def _mean(blocks: list[Block]) -> torch.Tensor:
    return _sum(blocks) / torch.stack([block.met for block in blocks]).sum(0).clamp(min=1)


def _running_mean(blocks: list[Block]) -> torch.Tensor:
    merged, any_met = blocks[0].out, blocks[0].met
    for block in blocks[1:]:
        half = torch.where(any_met, (merged + block.out) / 2, block.out)
        merged, any_met = torch.where(block.met, half, merged), any_met | block.met
    return merged


def _stale_weight(blocks: list[Block]) -> torch.Tensor:
    merged, so_far = blocks[0].out, blocks[0].lse
    for block in blocks[1:]:
        weight = (block.lse - torch.logaddexp(so_far, block.lse)).exp().nan_to_num(0.0)
        merged = merged + (block.out - merged) * weight
        so_far = torch.where(so_far.isfinite(), so_far, block.lse)
    return merged


def _own_maxima(blocks: list[Block]) -> torch.Tensor:
    sums = [(block.lse - block.top).exp().nan_to_num(0.0) for block in blocks]
    total = torch.stack(sums).sum(0).clamp(min=1.0)
    return torch.stack([b.out * s for b, s in zip(blocks, sums, strict=True)]).sum(0) / total


NEEDS_THREE = "weighted by the log-sum-exp of the first block alone"
"""The wrong merge that is right for two blocks."""

WRONG_MERGES: Mapping[str, Merge] = {
    "added up": _sum,
    "averaged": _mean,
    "averaged one after another": _running_mean,
    NEEDS_THREE: _stale_weight,
    "added up, each relative to a maximum of its own": _own_maxima,
}
"""How outputs of blocks are put together without their log-sum-exps, most likely first."""


def seen_by(shape: ModelShape, batch: TokenBatch) -> torch.Tensor:
    """Return what is visible, [T, S] or [B, T, S]."""
    positions_T = batch.positions_T
    return visible(positions_T, positions_T, shape.mask, batch.documents)


def _by_head(seen: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return [T, S] or [B, T, S] as a tensor of its own, [B, H, T, S]."""
    wide = seen if seen.dim() == 2 else seen[:, None]
    length, num_sequences, heads, _ = q.shape
    return wide.expand(num_sequences, heads, length, seen.shape[-1]).clone()


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _scores(q: torch.Tensor, k: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    scores_BHTS = torch.einsum("tbhd,sbhd->bhts", q, _repeated(k, q)) / q.shape[-1] ** 0.5
    if shape.soft_cap is None:
        return scores_BHTS
    return shape.soft_cap * torch.tanh(scores_BHTS / shape.soft_cap)


def _softmax(scores_BHTS: torch.Tensor) -> torch.Tensor:
    """Return the weights; a query that meets nothing has none."""
    return scores_BHTS.softmax(-1).nan_to_num(0.0)


def _output(weights_BHTS: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    out = torch.einsum("bhts,sbhd->tbhd", weights_BHTS, _repeated(v, q))
    return out.reshape(q.shape[0] * q.shape[1], -1)


def ring_steps(places: ContextPlaces) -> torch.Tensor:
    """Return at which step of the ring a query meets a key, [T, S]."""
    place_T = places.place_T
    return (place_T[None, :] - place_T[:, None]) % places.placement.ring_degree
