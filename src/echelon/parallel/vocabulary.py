# SPDX-License-Identifier: Apache-2.0
"""Vocabulary parallelism: the embedding and the loss, split over the token ids.

Split: rows of the embedding and of the head, [ceil(V/tp), D]; the last rows may be padding.
Sent:  embedding: one all-reduce (or reduce-scatter) of [N, D] forward; loss: an all-gather of
       three numbers per token, one all-reduce (or reduce-scatter) of [N, D], both backward.
Bytes: `tensor_bytes` in `cost/bytes/sent.py`.
Must divide: nothing; padded rows are masked out of the loss and get no gradient.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Hsu et al., "Liger Kernel", 2024, section
       3.2, for a loss in chunks of tokens.

The loss holds the logits of one chunk of tokens, [C, V/tp], and over tensor ranks those of the one
before. Where the weight's gradient waits for W, or adds up in few digits, the chunk is all tokens.
Shape suffixes: N tokens, D hidden, V local vocabulary with padding, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.cross_entropy import (
    LabelRows,
    LogitCap,
    RowStatistics,
    overwrite_with_gradient,
    row_statistics,
)
from echelon.parallel.storage.matmul import matmul
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
        """Add each token's gradient to the row that was looked up, unless the table is frozen."""
        local_N, elsewhere_N = ctx.saved_tensors
        split: TensorSplit = ctx.split
        if not split.store.trains(ctx.weight):
            return None, None, None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyHead:
    """Compute the loss of a microbatch from its stream, over a few tokens at a time.

    There are `vocab` real ids; the rows of the weight beyond them are padding. Logits z are
    products times `factor`, capped to c tanh(z / c) for a `soft_cap` of c.
    """

    weight_VD: nn.Parameter
    factor: float = 1.0
    labels_N: torch.Tensor
    scale: float
    vocab: int
    split: TensorSplit
    soft_cap: float | None = None

    def loss(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the loss alone."""
        x_ND, labels = self._gathered(x_ND), self._labels()
        losses = [
            self._logits(x_ND[rows], labels.rows(rows))[1]
            for rows in self._chunks(self.split.pieces.loss_rows)
        ]
        return self._sum(losses, labels)

    def loss_and_gradient(
        self, x_ND: torch.Tensor, dloss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and dx summed over the tensor ranks; the weight's goes to the store."""
        split, labels, x_ND = self.split, self._labels(), self._gathered(x_ND)
        factor = self.scale * self.factor * dloss
        dx_ND = torch.empty_like(x_ND)
        # A product that waits for W, or adds up in few digits, is one for all tokens.
        parts = split.store.takes_parts(self.weight_VD)
        chunks = list(self._chunks(split.pieces.loss_rows if parts else len(x_ND)))
        losses = [
            self._chunk(
                (x_ND[rows], dx_ND[rows]), labels.rows(rows), factor, more=rows is not chunks[-1]
            )
            for rows in chunks
        ]
        del x_ND
        if split.scattered:
            dx_ND, pending = scatter_sum(dx_ND, split.group, name="head.backward")
        else:
            pending = split.group.all_reduce(dx_ND, name="head.backward", async_op=True)
        split.store.run_deferred()
        pending.wait()
        return self._sum(losses, labels), dx_ND

    def _chunk(
        self,
        streams: tuple[torch.Tensor, torch.Tensor],
        labels: LabelRows,
        factor: torch.Tensor,
        *,
        more: bool,
    ) -> RowStatistics:
        """Write dx of a few tokens, and leave their part of the weight's gradient to the store.

        That part is computed while something is in flight: the numbers of the next chunk, or dx.
        """
        (x_CD, dx_CD), split = streams, self.split
        logits_CV, statistics = self._logits(x_CD, labels)
        factor_C = labels.counted_C * factor
        left_C = overwrite_with_gradient(
            *(logits_CV, statistics, labels, factor_C, split.pieces),
            provider=split.kernels.of("loss"),
        )
        if left_C is None:
            matmul(logits_CV, self.weight_VD.t(), out=dx_CD)
        else:
            left_C = left_C.unsqueeze(1)
            torch.mul(matmul(logits_CV, self.weight_VD.t()), left_C, out=dx_CD)
            if split.store.trains(self.weight_VD):
                x_CD = x_CD * left_C
        if split.store.trains(self.weight_VD):
            add = split.store.add_matmul
            split.store.defer(partial(add, [self.weight_VD], logits_CV, x_CD, more=more))
        if split.group.size == 1:
            split.store.run_deferred()
        return statistics

    def _logits(self, x_CD: torch.Tensor, labels: LabelRows) -> tuple[torch.Tensor, RowStatistics]:
        """Return the logits of some tokens, and their numbers over the whole vocabulary."""
        group, num_local = self.split.group, self.weight_VD.shape[0]
        logits_CV = matmul(x_CD, self.weight_VD)
        if self.factor != 1.0:
            logits_CV *= self.factor
        if self._real < num_local:
            logits_CV[:, self._real :] = float("-inf")
        local = row_statistics(
            *(logits_CV, labels.local_C, self.split.pieces),
            provider=self.split.kernels.of("loss"),
            cap=self._cap,
        )
        if group.size == 1:
            maximum_C, total_C, target_C = local
            return logits_CV, RowStatistics(
                maximum_C=maximum_C,
                total_C=total_C,
                target_C=target_C,
                local_maximum_C=maximum_C,
                cap=self._cap,
            )
        local[2].masked_fill_(~labels.mine_C, 0.0)
        every = local.new_empty((group.size, *local.shape))
        whole = every.view(-1, local.shape[-1])
        gathered = group.all_gather(whole, local, name="head.statistics", async_op=True)
        self.split.store.run_deferred()
        gathered.wait()
        maximum_C = every[:, 0].amax(0)
        total_C = (every[:, 1] * (every[:, 0] - maximum_C).exp()).sum(0)
        return logits_CV, RowStatistics(
            maximum_C=maximum_C,
            total_C=total_C,
            target_C=every[:, 2].sum(0),
            local_maximum_C=local[0],
            cap=self._cap,
        )

    @property
    def _real(self) -> int:
        """Return how many rows of the weight here are no padding."""
        num_local = self.weight_VD.shape[0]
        return max(0, min(num_local, self.vocab - self.split.group.index * num_local))

    @property
    def _cap(self) -> LogitCap | None:
        return None if self.soft_cap is None else LogitCap(self.soft_cap, self._real)

    def _labels(self) -> LabelRows:
        counted_N = self.labels_N != IGNORED_LABEL
        ids_N = self.labels_N.clamp(min=0)
        local_N, elsewhere_N = local_ids(ids_N, self.weight_VD.shape[0], self.split.group)
        return LabelRows(local_C=local_N, mine_C=counted_N & ~elsewhere_N, counted_C=counted_N)

    def _gathered(self, x_ND: torch.Tensor) -> torch.Tensor:
        if not self.split.scattered:
            return x_ND
        x_ND, gathered = gather_rows(x_ND, self.split.group, name="head.forward")
        gathered.wait()
        return x_ND

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, len(self.labels_N), num_rows):
            yield slice(start, start + num_rows)

    def _sum(self, chunks: Sequence[RowStatistics], labels: LabelRows) -> torch.Tensor:
        losses_N = torch.cat([one.log_sum_C - one.target_C for one in chunks])
        return torch.where(labels.counted_C, losses_N, 0.0).sum() * self.scale


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits that no rank holds whole, neither all columns nor all rows.

    Loss and gradients come from the same logits, so all is computed in backward: a forward pass
    that computed the loss would keep the logits, or make them twice.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight_VD: nn.Parameter, head: VocabularyHead
    ) -> torch.Tensor:
        """Return where backward will write scale x the sum over counted tokens of their loss.

        That of a token is log(sum exp(logits)) - logit[label]. Until then it is not a number.
        """
        loss = x_ND.new_full((), float("nan"), dtype=at_least_fp32(x_ND.dtype))
        ctx.save_for_backward(x_ND)
        ctx.head, ctx.loss = head, loss.detach()
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Write the loss; return dx, summed over the tensor ranks."""
        head: VocabularyHead = ctx.head
        loss, dx_ND = head.loss_and_gradient(ctx.saved_tensors[0].detach(), dloss)
        ctx.loss.copy_(loss)
        return dx_ND, None, None


def vocabulary_loss(x_ND: torch.Tensor, head: VocabularyHead) -> torch.Tensor:
    """Return scale x the sum of token losses: at once, or where there is a backward, after it."""
    if torch.is_grad_enabled() and (x_ND.requires_grad or head.weight_VD.requires_grad):
        loss: torch.Tensor = VocabularyLoss.apply(x_ND, head.weight_VD, head)
        return loss
    return head.loss(x_ND.detach())


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
