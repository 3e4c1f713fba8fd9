"""Kernels of the loss of a few tokens, whose logits become their gradient in place.

Two passes, both over pieces of the rows that stay in cache (`row_chunks`): one finds the maximum of
each row, the sum of exp(logit - maximum) and the label's logit; the other makes the gradient.
Logits of at least float32 become exp(logit - maximum) in the first pass, and what is left to
multiply, which is one number for each row, is multiplied where it is smaller: after the products
with them. bf16 and fp16 logits are left alone by the first pass; the second takes each exponential
in float32 and rounds factor x (softmax - one-hot) once.

Shape suffixes: C tokens, V local vocabulary with padding, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.models.piece_sizes import PieceSizes
from echelon.models.precision import LOW_PRECISION, at_least_fp32
from echelon.parallel.kernels.low_precision import row_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRows:
    """Say for some tokens which column of the logits here is the label's.

    `local_C` is 0 where another rank has it or nothing is counted; `mine_C` says where neither is.
    """

    local_C: torch.Tensor
    mine_C: torch.Tensor
    counted_C: torch.Tensor

    def rows(self, rows: slice) -> LabelRows:
        """Return those of some rows."""
        return LabelRows(
            local_C=self.local_C[rows], mine_C=self.mine_C[rows], counted_C=self.counted_C[rows]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Give the maximum of each row of logits, the sum of exp(logit - maximum), the label's logit.

    They are of the whole vocabulary; `local_maximum_C` is that of the columns of this rank.
    """

    maximum_C: torch.Tensor
    total_C: torch.Tensor
    target_C: torch.Tensor
    local_maximum_C: torch.Tensor

    @property
    def log_sum_C(self) -> torch.Tensor:
        """Return the logarithm of the sum of exp(logit)."""
        return self.maximum_C + self.total_C.log()


def row_statistics(
    logits_CV: torch.Tensor, local_C: torch.Tensor, pieces: PieceSizes
) -> torch.Tensor:
    """Return maximum, sum of exp(logit - maximum) and logit `local_C` of each row [3, C].

    Logits of at least float32 become exp(logit - maximum) in place; narrower ones are left alone.
    """
    wide = at_least_fp32(logits_CV.dtype)
    statistics = logits_CV.new_empty((3, logits_CV.shape[0]), dtype=wide)
    for rows in row_chunks(logits_CV, pieces):
        piece = logits_CV[rows].to(wide)
        statistics[2, rows] = piece.gather(1, local_C[rows, None]).squeeze(1)
        # A rank that holds only padding has no maximum; any finite number does, its sum is 0.
        maximum = piece.amax(1).clamp_(min=torch.finfo(wide).min)
        statistics[0, rows] = maximum
        piece.sub_(maximum.unsqueeze(1)).exp_()
        torch.sum(piece, dim=1, out=statistics[1, rows])
    return statistics


def overwrite_with_gradient(
    logits_CV: torch.Tensor,
    statistics: RowStatistics,
    labels: LabelRows,
    factor_C: torch.Tensor,
    pieces: PieceSizes,
) -> torch.Tensor | None:
    """Turn logits, as `row_statistics` left them, into factor x (softmax - one-hot) in place.

    Where they are of at least float32 a number for each row is left to multiply them by: returned.
    """
    if logits_CV.dtype in LOW_PRECISION:
        whole_C, mine_C = statistics.log_sum_C, labels.mine_C.float()
        for rows in row_chunks(logits_CV, pieces):
            gradient = logits_CV[rows].float().sub_(whole_C[rows, None]).exp_()
            gradient.scatter_add_(1, labels.local_C[rows, None], -mine_C[rows, None])
            torch.mul(gradient, factor_C[rows, None], out=logits_CV[rows])
        return None
    if statistics.local_maximum_C is not statistics.maximum_C:
        away_C = (statistics.local_maximum_C - statistics.maximum_C).exp_()
        logits_CV.mul_(away_C.unsqueeze(1))
    own_C = torch.where(labels.mine_C, -statistics.total_C, 0.0)
    logits_CV.scatter_add_(1, labels.local_C.unsqueeze(1), own_C.unsqueeze(1))
    return torch.where(labels.counted_C, factor_C / statistics.total_C, 0.0)
