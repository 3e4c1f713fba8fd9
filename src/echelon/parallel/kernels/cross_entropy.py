# SPDX-License-Identifier: Apache-2.0
"""Kernels of the loss of a few tokens, whose logits become their gradient in place.

Two passes, both over pieces of the rows that stay in cache (`row_chunks`): one finds the maximum of
each row, the sum of exp(logit - maximum) and the label's logit; the other makes the gradient.
Logits of at least float32 become exp(logit - maximum) in the first pass, and what is left to
multiply, which is one number for each row, is multiplied where it is smaller: after the products
with them. bf16 and fp16 logits are left alone by the first pass; the second takes each exponential
in float32 and rounds factor x (softmax - one-hot) once.

Where the plan has kernels, each pass is one, which takes float32 like bf16: in Triton on a GPU
(`cross_entropy_triton.py`), or what PyTorch's compiler makes of the formula. Capped logits go by
pieces whatever the plan has: both passes cap a piece in at least float32, and leave the rest alone.

Shape suffixes: C tokens, V local vocabulary with padding, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from echelon.core.choices.kernels import KernelProvider
from echelon.core.piece_sizes import PieceSizes
from echelon.models.precision import LOW_PRECISION, at_least_fp32
from echelon.parallel.kernels import piece_formulas
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.kernels.operators import define_operator
from echelon.parallel.kernels.piece_operators import compiled


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


@dataclass(frozen=True, slots=True)
class LogitCap:
    """Say that logits z count as c tanh(z / c); columns from `real` on are padding."""

    cap: float
    real: int

    def capped(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the capped logits in at least float32, in memory of their own."""
        wide = at_least_fp32(logits_CV.dtype)
        capped_CV = logits_CV.to(wide, copy=True).div_(self.cap).tanh_().mul_(self.cap)
        capped_CV[:, self.real :] = float("-inf")
        return capped_CV

    def slopes(self, capped_CV: torch.Tensor) -> torch.Tensor:
        """Return the derivative of each capped logit by the logit: 1 - (z / c)^2."""
        # What is padding has no gradient, and a slope that is a number.
        return (capped_CV / self.cap).clamp_(min=-1.0).square_().neg_().add_(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """Give the maximum of each row of logits, the sum of exp(logit - maximum), the label's logit.

    They are of the whole vocabulary; `local_maximum_C` is that of the columns of this rank. Where
    logits have a `cap` they are those of capped ones.
    """

    maximum_C: torch.Tensor
    total_C: torch.Tensor
    target_C: torch.Tensor
    local_maximum_C: torch.Tensor
    cap: LogitCap | None = None

    @property
    def log_sum_C(self) -> torch.Tensor:
        """Return the logarithm of the sum of exp(logit)."""
        return self.maximum_C + self.total_C.log()


def row_statistics(
    logits_CV: torch.Tensor,
    local_C: torch.Tensor,
    pieces: PieceSizes,
    *,
    provider: KernelProvider = "plain",
    cap: LogitCap | None = None,
) -> torch.Tensor:
    """Return maximum, sum of exp(logit - maximum) and logit `local_C` of each row [3, C].

    Without a kernel for it logits of at least float32 become exp(logit - maximum) in place; others
    are left alone, and so are those that have a cap.
    """
    if cap is None and has_kernels(logits_CV, provider):
        return torch.ops.echelon.loss_statistics(logits_CV, local_C, provider)
    wide = at_least_fp32(logits_CV.dtype)
    statistics = logits_CV.new_empty((3, logits_CV.shape[0]), dtype=wide)
    for rows in row_chunks(logits_CV, pieces):
        # One piece is there at a time: no name holds it while the next is made.
        _piece_statistics(
            logits_CV[rows].to(wide) if cap is None else cap.capped(logits_CV[rows]),
            local_C[rows, None],
            statistics[:, rows],
        )
    return statistics


def _piece_statistics(
    piece_CV: torch.Tensor, local_C1: torch.Tensor, statistics_3C: torch.Tensor
) -> None:
    statistics_3C[2] = piece_CV.gather(1, local_C1).squeeze(1)
    # A rank that holds only padding has no maximum; any finite number does, its sum is 0.
    maximum_C = piece_CV.amax(1).clamp_(min=torch.finfo(piece_CV.dtype).min)
    statistics_3C[0] = maximum_C
    piece_CV.sub_(maximum_C.unsqueeze(1)).exp_()
    torch.sum(piece_CV, dim=1, out=statistics_3C[1])


def overwrite_with_gradient(
    logits_CV: torch.Tensor,
    statistics: RowStatistics,
    labels: LabelRows,
    factor_C: torch.Tensor,
    pieces: PieceSizes,
    *,
    provider: KernelProvider = "plain",
) -> torch.Tensor | None:
    """Turn logits, as `row_statistics` left them, into factor x (softmax - one-hot) in place.

    Where they are of at least float32, and have no cap, a number for each row is left to multiply
    them by: returned.
    """
    cap = statistics.cap
    if cap is None and has_kernels(logits_CV, provider):
        torch.ops.echelon.loss_gradient_(
            logits_CV, statistics.log_sum_C, labels.local_C, labels.mine_C, factor_C, provider
        )
        return None
    if cap is not None or logits_CV.dtype in LOW_PRECISION:
        whole_C = statistics.log_sum_C
        mine_C = labels.mine_C.to(whole_C.dtype)
        for rows in row_chunks(logits_CV, pieces):
            piece = logits_CV[rows].float() if cap is None else cap.capped(logits_CV[rows])
            slopes = None if cap is None else cap.slopes(piece)
            gradient = piece.sub_(whole_C[rows, None]).exp_()
            gradient.scatter_add_(1, labels.local_C[rows, None], -mine_C[rows, None])
            if slopes is not None:
                gradient.mul_(slopes)
                del slopes
            torch.mul(gradient, factor_C[rows, None], out=logits_CV[rows])
        return None
    if statistics.local_maximum_C is not statistics.maximum_C:
        away_C = (statistics.local_maximum_C - statistics.maximum_C).exp_()
        logits_CV.mul_(away_C.unsqueeze(1))
    own_C = torch.where(labels.mine_C, -statistics.total_C, 0.0)
    logits_CV.scatter_add_(1, labels.local_C.unsqueeze(1), own_C.unsqueeze(1))
    return torch.where(labels.counted_C, factor_C / statistics.total_C, 0.0)


def has_kernels(logits_CV: torch.Tensor, provider: KernelProvider) -> bool:
    """Return whether each pass is one kernel: those in Triton are for GPUs."""
    if provider == "plain" or logits_CV.dtype == torch.float64:
        return False
    return provider == "compiled" or logits_CV.is_cuda or logits_CV.is_meta  # or is rehearsed


def _statistics(logits_CV: torch.Tensor, local_C: torch.Tensor, provider: str) -> torch.Tensor:
    if provider == "triton":
        return _in_triton().row_statistics(logits_CV, local_C)
    return compiled("loss_statistics", logits_CV.dtype)(logits_CV, local_C)


def _gradient(
    logits_CV: torch.Tensor,
    log_sum_C: torch.Tensor,
    local_C: torch.Tensor,
    mine_C: torch.Tensor,
    factor_C: torch.Tensor,
    provider: str,
) -> None:
    args = (logits_CV, log_sum_C, local_C, mine_C, factor_C)
    if provider == "triton":
        _in_triton().overwrite_with_gradient(*args)
    else:
        compiled("loss_gradient", logits_CV.dtype)(*args)


def _in_triton() -> Any:
    return import_module("echelon.parallel.kernels.cross_entropy_triton")


define_operator(
    "loss_statistics(Tensor logits, Tensor local, str provider) -> Tensor",
    cpu=_statistics,
    meta=lambda logits_CV, local_C, _: piece_formulas.loss_statistics(logits_CV, local_C),
)
define_operator(
    "loss_gradient_(Tensor(a!) logits, Tensor log_sum, Tensor local, Tensor mine, Tensor factor,"
    " str provider) -> ()",
    cpu=_gradient,
)
