"""Kernels of the loss of a few tokens, whose logits become their gradient in place.

Two passes, both over pieces of the rows that stay in cache (`row_chunks`): one finds the maximum of
each row, the sum of exp(logit - maximum) and the label's logit; the other makes the gradient.
Logits of at least float32 become exp(logit - maximum) in the first pass, and what is left to
multiply, which is one number for each row, is multiplied where it is smaller: after the products
with them. bf16 and fp16 logits are left alone by the first pass; the second takes each exponential
in float32 and rounds factor x (softmax - one-hot) once.

On a GPU each pass is one kernel (`cross_entropy_triton.py`), which takes float32 like bf16.

Shape suffixes: C tokens, V local vocabulary with padding, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from echelon.models.piece_sizes import PieceSizes
from echelon.models.precision import LOW_PRECISION, at_least_fp32
from echelon.parallel.kernels.low_precision import row_chunks

_LIBRARY = torch.library.Library("echelon", "FRAGMENT")
_LIBRARY.define("loss_statistics(Tensor logits, Tensor local) -> Tensor")
_LIBRARY.define(
    "loss_gradient_(Tensor(a!) logits, Tensor log_sum, Tensor local, Tensor mine, Tensor factor)"
    " -> ()"
)


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

    On a CPU logits of at least float32 become exp(logit - maximum) in place; others are left alone.
    """
    if has_fused_kernels(logits_CV):
        return torch.ops.echelon.loss_statistics(logits_CV, local_C)
    wide = at_least_fp32(logits_CV.dtype)
    statistics = logits_CV.new_empty((3, logits_CV.shape[0]), dtype=wide)
    for rows in row_chunks(logits_CV, pieces):
        _piece_statistics(logits_CV[rows].to(wide), local_C[rows, None], statistics[:, rows])
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
) -> torch.Tensor | None:
    """Turn logits, as `row_statistics` left them, into factor x (softmax - one-hot) in place.

    Where they are of at least float32 a number for each row is left to multiply them by: returned.
    """
    if has_fused_kernels(logits_CV):
        torch.ops.echelon.loss_gradient_(
            logits_CV, statistics.log_sum_C, labels.local_C, labels.mine_C, factor_C
        )
        return None
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


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_fused_kernels(logits_CV: torch.Tensor) -> bool:
    """Return whether each pass is one kernel: on a GPU, with what PyTorch's builds for it bring."""
    if logits_CV.dtype == torch.float64:
        return False
    return logits_CV.is_meta or (logits_CV.is_cuda and _has_triton())  # or is rehearsed


def _on_shapes(logits_CV: torch.Tensor, local_C: torch.Tensor) -> torch.Tensor:
    return logits_CV.new_empty((3, logits_CV.shape[0]), dtype=torch.float32)


def _fused_statistics(logits_CV: torch.Tensor, local_C: torch.Tensor) -> torch.Tensor:
    return _kernels().row_statistics(logits_CV, local_C)


def _fused_gradient(*tensors: torch.Tensor) -> None:
    _kernels().overwrite_with_gradient(*tensors)


def _kernels() -> Any:
    return import_module("echelon.parallel.kernels.cross_entropy_triton")


def _nothing(*tensors: torch.Tensor) -> None:
    """Make nothing: the gradient takes the place of the logits."""


_LIBRARY.impl("loss_statistics", _fused_statistics, "CUDA")
_LIBRARY.impl("loss_gradient_", _fused_gradient, "CUDA")
_LIBRARY.impl("loss_statistics", _on_shapes, "Meta")
_LIBRARY.impl("loss_gradient_", _nothing, "Meta")
