# SPDX-License-Identifier: Apache-2.0
"""Attention done wrong on one device: pairs met never or twice, blocks merged wrong, heads moved.

Shape suffixes: T queries, S keys, B sequences, H heads; see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.proof.causes.token_ranks import ContextPositions

CountPairs = Callable[[torch.Tensor, TokenBatch], torch.Tensor]
"""From what is visible, [T, S] or [B, T, S], to how often each query meets each key."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention: queries [T,B,H,hd], keys and values [S,B,K,hd], the mask's places."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    shape: ModelShape
    batch: TokenBatch
    sinks_H: nn.Parameter | None = None

    def right(self) -> torch.Tensor:
        """Return what attention gives that is done right, [N, H * hd]."""
        return Operations().attend(
            self.q, self.k, self.v, self.shape, self.batch, sinks_H=self.sinks_H
        )

    def by_head(self, seen: torch.Tensor) -> torch.Tensor:
        """Return [T, S] or [B, T, S] as a tensor of its own, [B, H, T, S]."""
        wide = seen if seen.dim() == 2 else seen[:, None]
        length, num_sequences, heads, _ = self.q.shape
        return wide.expand(num_sequences, heads, length, seen.shape[-1]).clone()

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        """Return keys or values with a head for each query head."""
        return x.repeat_interleave(self.q.shape[2] // x.shape[2], dim=2)

    def scores(self) -> torch.Tensor:
        """Return the scores of all pairs, [B, H, T, S]."""
        q, k, cap = self.q, self.repeated(self.k), self.shape.soft_cap
        scores_BHTS = torch.einsum("tbhd,sbhd->bhts", q, k) * self.shape.score_scale
        return scores_BHTS if cap is None else cap * torch.tanh(scores_BHTS / cap)

    def output(self, scores_BHTS: torch.Tensor) -> torch.Tensor:
        """Return the values weighted by the softmax, [T,B,H,hd]: 0 where a query meets nothing."""
        if self.sinks_H is not None:
            sinks_BHT1 = self.sinks_H[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
            scores_BHTS = torch.cat((scores_BHTS, sinks_BHT1.to(scores_BHTS.dtype)), dim=-1)
        weights_BHTS = scores_BHTS.softmax(-1).nan_to_num(0.0)[..., : len(self.k)]
        return torch.einsum("bhts,sbhd->tbhd", weights_BHTS, self.repeated(self.v))


class WrongAttention(Operations):
    """The plain operations, but for attention, which is done wrong."""

    def __init__(self, wrong: Callable[[AttentionCall], torch.Tensor]) -> None:
        """Attend as `wrong` does."""
        self.wrong = wrong

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
        *,
        sinks_H: nn.Parameter | None = None,
    ) -> torch.Tensor:
        """Return what `wrong` gives, as [N, H * hd]."""
        out = self.wrong(AttentionCall(q, k, v, shape, batch, sinks_H))
        return out.reshape(q.shape[0] * q.shape[1], -1)


def counted_attention(counted: CountPairs, heads: tuple[int, ...] | None = None) -> WrongAttention:
    """Let queries meet keys as often as `counted` says, for some heads or for all.

    A pair that meets twice has twice the weight.
    """

    def attend(call: AttentionCall) -> torch.Tensor:
        seen = seen_by(call.shape, call.batch)
        times_BHTS = call.by_head(seen).to(call.q.dtype)
        chosen = slice(None) if heads is None else list(heads)
        wrong_BHTS = call.by_head(counted(seen, call.batch)).to(call.q.dtype)
        times_BHTS[:, chosen] = wrong_BHTS[:, chosen]
        return call.output(call.scores() + times_BHTS.log())

    return WrongAttention(attend)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAttention:
    """Hold attention over one block of keys: out [T,B,H,hd], lse and the top score [T,B,H,1]."""

    out: torch.Tensor
    lse: torch.Tensor
    top: torch.Tensor

    @property
    def met(self) -> torch.Tensor:
        """Return whether a query meets a key of the block."""
        return self.lse.isfinite()


MergeBlocks = Callable[[list[PartialAttention]], torch.Tensor]
"""From blocks in their order to one output."""


BlockNumbers = Callable[[TokenBatch], torch.Tensor]
"""From a batch to the number of the block in which a query meets a key, [T, S] or [B, T, S]."""


def merged_attention(numbers: BlockNumbers, merge: MergeBlocks) -> WrongAttention:
    """Attend to blocks of keys by themselves, in the order of `numbers`, then `merge` wrong."""

    def attend(call: AttentionCall) -> torch.Tensor:
        scores_BHTS, seen = call.scores(), call.by_head(seen_by(call.shape, call.batch))
        number_BHTS = call.by_head(numbers(call.batch))
        blocks: list[PartialAttention] = []
        for number in range(int(number_BHTS.max()) + 1):
            here = seen & (number_BHTS == number)
            block = scores_BHTS.masked_fill(~here, float("-inf"))
            lse, top = (
                x.permute(2, 0, 1).unsqueeze(-1) for x in (block.logsumexp(-1), block.amax(-1))
            )
            blocks.append(PartialAttention(out=call.output(block), lse=lse, top=top))
        return merge(blocks)

    return WrongAttention(attend)


def remapped_heads(choose: Callable[[int, int, int], int]) -> WrongAttention:
    """Let each query head meet the key/value head ``choose(head, repeats, key/value heads)``."""

    def attend(call: AttentionCall) -> torch.Tensor:
        heads, kv_heads = call.q.shape[2], call.k.shape[2]
        chosen = [choose(head, heads // kv_heads, kv_heads) for head in range(heads)]
        return replace(call, k=call.k[:, :, chosen], v=call.v[:, :, chosen]).right()

    return WrongAttention(attend)


def moved_heads(heads: list[int]) -> WrongAttention:
    """Give query head h what `heads[h]` found."""

    def attend(call: AttentionCall) -> torch.Tensor:
        return call.right().unflatten(1, (call.q.shape[2], -1))[:, heads]

    return WrongAttention(attend)


def _sum(blocks: list[PartialAttention]) -> torch.Tensor:
    return torch.stack([block.out for block in blocks]).sum(0)


def _mean(blocks: list[PartialAttention]) -> torch.Tensor:
    return _sum(blocks) / torch.stack([block.met for block in blocks]).sum(0).clamp(min=1)


def _running_mean(blocks: list[PartialAttention]) -> torch.Tensor:
    merged, any_met = blocks[0].out, blocks[0].met
    for block in blocks[1:]:
        half = torch.where(any_met, (merged + block.out) / 2, block.out)
        merged, any_met = torch.where(block.met, half, merged), any_met | block.met
    return merged


def _stale_weight(blocks: list[PartialAttention]) -> torch.Tensor:
    merged, so_far = blocks[0].out, blocks[0].lse
    for block in blocks[1:]:
        weight = (block.lse - torch.logaddexp(so_far, block.lse)).exp().nan_to_num(0.0)
        merged = merged + (block.out - merged) * weight
        so_far = torch.where(so_far.isfinite(), so_far, block.lse)
    return merged


def _own_maxima(blocks: list[PartialAttention]) -> torch.Tensor:
    sums = [(block.lse - block.top).exp().nan_to_num(0.0) for block in blocks]
    total = torch.stack(sums).sum(0).clamp(min=1.0)
    return torch.stack([b.out * s for b, s in zip(blocks, sums, strict=True)]).sum(0) / total


NEEDS_THREE = "weighted by the log-sum-exp of the first block alone"
"""The wrong merge that is right for two blocks."""

WRONG_MERGES: Mapping[str, MergeBlocks] = {
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


def ring_steps(places: ContextPositions) -> torch.Tensor:
    """Return at which step of the ring a query meets a key, [T, S]."""
    place_T = places.ring_rank_T
    return (place_T[None, :] - place_T[:, None]) % places.placement.ring_degree
