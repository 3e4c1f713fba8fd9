"""Vocabulary parallelism: the embedding and the loss, split over the token ids.

Split: rows of the embedding and of the head, [ceil(V/tp), D]; the last rows may be padding.
Sent:  embedding: one all-reduce (or reduce-scatter) of [N, D] forward; loss: an all-gather of
       three numbers per token forward, one all-reduce (or reduce-scatter) of [N, D] backward.
Bytes: `tensor_bytes` in `cost/bytes/sent.py`.
Must divide: nothing; padded rows are masked out of the loss and get no gradient.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; the loss never holds more than [N, V/tp].

bf16 and fp16 logits are kept as they are and turned to float32 by pieces, forward and backward; all
numbers per token, sent ones included, are float32.
Shape suffixes: N tokens, D hidden, V local vocabulary with padding, C rows of a piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.piece_sizes import PieceSizes
from echelon.models.precision import LOW_PRECISION, at_least_fp32
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.kernels.matmul import matmul
from echelon.parallel.tensor import TensorSplit
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import gather_rows, own_rows, scatter_sum


class VocabularyEmbedding(torch.autograd.Function):
    """Look up the rows that this rank holds, and sum over the ranks: one of them has each."""

    @staticmethod
    def forward(
        ctx: Any, weight_VD: nn.Parameter, batch: TokenBatch, split: TensorSplit
    ) -> torch.Tensor:
        """Return x_ND, or this rank's rows of it under sequence parallelism."""
        group = split.group
        local_N, elsewhere_N = local_ids(batch.tokens_N, weight_VD.shape[0], group)
        ctx.weight, ctx.split = weight_VD, split
        ctx.save_for_backward(local_N, elsewhere_N)
        x_ND = weight_VD.detach()[local_N]
        if group.size == 1:
            return x_ND
        x_ND.masked_fill_(elsewhere_N.unsqueeze(1), 0.0)
        if split.scattered:
            x_ND, pending = scatter_sum(x_ND, group, name="embedding.forward")
        else:
            pending = group.all_reduce(x_ND, name="embedding.forward", async_op=True)
        pending.wait()
        return x_ND

    @staticmethod
    def backward(ctx: Any, dx_ND: torch.Tensor) -> tuple[None, ...]:
        """Add each token's gradient to the row that was looked up."""
        local_N, elsewhere_N = ctx.saved_tensors
        split: TensorSplit = ctx.split
        if split.scattered:
            dx_ND, gathered = gather_rows(dx_ND, split.group, name="embedding.backward")
            gathered.wait()
        if split.group.size > 1:
            # Not left out: how many are here only the device knows, and the host would wait.
            dx_ND = dx_ND.masked_fill(elsewhere_N.unsqueeze(1), 0.0)
        split.store.add_rows(ctx.weight, local_N, dx_ND)
        return None, None, None


class PositionEmbedding(torch.autograd.Function):
    """Add learned position vectors to the rows of the stream that this rank holds."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_TD: nn.Parameter,
        positions_N: torch.Tensor,
        split: TensorSplit,
    ) -> torch.Tensor:
        """Return x plus the vector of each row's position."""
        ctx.weight, ctx.split = weight_TD, split
        ctx.save_for_backward(positions_N)
        return x_ND + weight_TD[positions_N]

    @staticmethod
    def backward(ctx: Any, dx_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Add each row's gradient to its position's; pass it on."""
        (positions_N,) = ctx.saved_tensors
        ctx.split.store.add_rows(ctx.weight, positions_N, dx_ND)
        return dx_ND, None, None, None


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits that no rank holds whole."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_VD: nn.Parameter,
        labels_N: torch.Tensor,
        scale_and_vocab: tuple[float, int],
        split: TensorSplit,
    ) -> torch.Tensor:
        """Return scale x the sum over counted tokens of log(sum exp(logits)) - logit[label].

        There are `vocab` real ids; the rows of the weight beyond them are padding.
        """
        group, (scale, vocab) = split.group, scale_and_vocab
        if split.scattered:
            x_ND, gathered = gather_rows(x_ND, group, name="head.forward")
            gathered.wait()
        real = max(0, min(weight_VD.shape[0], vocab - group.index * weight_VD.shape[0]))
        counted_N = labels_N != IGNORED_LABEL
        local_N, elsewhere_N = local_ids(labels_N.clamp(min=0), weight_VD.shape[0], group)
        logits_NV = matmul(x_ND, weight_VD)
        logits_NV[:, real:] = float("-inf")
        local = _local_statistics(logits_NV, local_N, split.pieces)
        local[2].masked_fill_(elsewhere_N, 0.0)
        maximum_N, total_N, target_N = _merge(local, group)
        whole_N = maximum_N + total_N.log()
        mine_N = counted_N & ~elsewhere_N
        if logits_NV.dtype in LOW_PRECISION:
            factor_N = counted_N * scale
        else:
            # These logits hold exp(logit - local maximum): they become total x gradient of the
            # loss, and what is left to multiply is smaller than they are (`backward`).
            if group.size > 1:
                logits_NV.mul_((local[0] - maximum_N).exp_().unsqueeze(1))
            own_N = torch.where(mine_N, -total_N, 0.0)
            logits_NV.scatter_add_(1, local_N.unsqueeze(1), own_N.unsqueeze(1))
            factor_N = torch.where(counted_N, scale / total_N, 0.0)
        ctx.save_for_backward(x_ND, logits_NV, factor_N, whole_N, local_N, mine_N)
        ctx.weight, ctx.split = weight_VD, split
        return torch.where(counted_N, whole_N - target_N, 0.0).sum() * scale

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx, summed over the tensor ranks; the head's gradient runs meanwhile."""
        x_ND, logits_NV, factor_N, whole_N, local_N, mine_N = ctx.saved_tensors
        split: TensorSplit = ctx.split
        weight: nn.Parameter = ctx.weight
        factor_N = factor_N * dloss
        if logits_NV.dtype in LOW_PRECISION:
            _overwrite_with_gradient(logits_NV, factor_N, whole_N, local_N, mine_N, split.pieces)
            dx_ND = matmul(logits_NV, weight.t())
        else:
            dx_ND = matmul(logits_NV, weight.t()).mul_(factor_N.unsqueeze(1))
            x_ND = x_ND * factor_N.unsqueeze(1)
        if split.scattered:
            dx_ND, pending = scatter_sum(dx_ND, split.group, name="head.backward")
        else:
            pending = split.group.all_reduce(dx_ND, name="head.backward", async_op=True)
        split.store.add_matmul([weight], logits_NV, x_ND.detach())
        pending.wait()
        return dx_ND, None, None, None, None


def local_ids(
    ids_N: torch.Tensor, num_local: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id as a row of this rank (0 where another holds it), and where one does."""
    local_N = ids_N - group.index * num_local
    elsewhere_N = (local_N < 0) | (local_N >= num_local)
    return local_N.masked_fill(elsewhere_N, 0), elsewhere_N


def stream_rows(num_rows: int, split: TensorSplit, device: torch.device) -> torch.Tensor:
    """Return the global rows of the residual stream that this rank holds."""
    rows = torch.arange(num_rows, device=device)
    return rows[own_rows(num_rows, split.group)] if split.scattered else rows


def _local_statistics(
    logits_NV: torch.Tensor, local_N: torch.Tensor, pieces: PieceSizes
) -> torch.Tensor:
    """Return maximum, sum of exp(logit - maximum) and target of each row [3, N].

    Logits of at least float32 become exp(logit - maximum) in place; narrower ones are left alone.
    """
    wide = at_least_fp32(logits_NV.dtype)
    statistics = logits_NV.new_empty((3, logits_NV.shape[0]), dtype=wide)
    for rows in row_chunks(logits_NV, pieces):
        logits_CV = logits_NV[rows].to(wide)
        statistics[2, rows] = logits_CV.gather(1, local_N[rows, None]).squeeze(1)
        # A rank that holds only padding has no maximum; any finite number does, its sum is 0.
        maximum_C = logits_CV.amax(1).clamp_(min=torch.finfo(wide).min)
        statistics[0, rows] = maximum_C
        logits_CV.sub_(maximum_C.unsqueeze(1)).exp_()
        torch.sum(logits_CV, dim=1, out=statistics[1, rows])
    return statistics


def _overwrite_with_gradient(
    logits_NV: torch.Tensor,
    factor_N: torch.Tensor,
    whole_N: torch.Tensor,
    local_N: torch.Tensor,
    mine_N: torch.Tensor,
    pieces: PieceSizes,
) -> None:
    """Turn bf16 or fp16 logits into factor (softmax - one-hot) in place, each rounded once.

    `whole_N` is the logarithm of the sum of exponentials over the whole vocabulary.
    """
    for rows in row_chunks(logits_NV, pieces):
        gradient_CV = logits_NV[rows].float().sub_(whole_N[rows, None]).exp_()
        gradient_CV.scatter_add_(1, local_N[rows, None], -mine_N[rows, None].float())
        torch.mul(gradient_CV, factor_N[rows, None], out=logits_NV[rows])


def _merge(local: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return maximum, sum of exponentials and target logit over the whole vocabulary."""
    if group.size == 1:
        return local[0], local[1], local[2]
    every = local.new_empty((group.size, *local.shape))
    group.all_gather(every.view(-1, local.shape[-1]), local, name="head.statistics").wait()
    maximum_N = every[:, 0].amax(0)
    total_N = (every[:, 1] * (every[:, 0] - maximum_N).exp()).sum(0)
    return maximum_N, total_N, every[:, 2].sum(0)
