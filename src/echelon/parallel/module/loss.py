# SPDX-License-Identifier: Apache-2.0
"""The loss of one's own module: a sum, and what it is divided by.

The mean of means is not the mean: microbatches and data ranks may count different numbers of
tokens. So a loss is two functions. The sum is of the module's output and a microbatch; the count is
of the microbatch alone, as the counts of all are added up before the first backward begins.

The sum of token losses makes no second table of the size of the logits.
`torch.nn.functional.cross_entropy` keeps the logarithm of every probability, and its backward makes
two more tables as large as the logits: one of zeros but for the labels, and the gradient. Here one
number of each row is kept, and the gradient is all that is made. Both passes go over pieces of the
rows that stay in cache, and compute each in at least float32.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from echelon.core.errors import ConfigError
from echelon.core.rulebook.module import MODULE_LOSS
from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.module.forwards.own_forward import is_transformed

Batch: TypeAlias = Mapping[str, Any]
"""Named tensors whose first dim is samples; what is no tensor is given to the module as it is."""

IGNORED = -100
"""The label of a token that does not count, as in PyTorch."""

LABELS = "labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoss:
    """Say what of a microbatch is added up, and what the sum over all microbatches is divided by.

    What `targets` names is for the loss, and is not given to the module. `prepare` is done to the
    global batch before anything is cut, where samples and sequences are whole. Each forward of the
    module is inside of `around`.
    """

    sum_of: Callable[[Any, Batch], torch.Tensor]
    count_of: Callable[[Batch], int]
    targets: tuple[str, ...] = (LABELS,)
    prepare: Callable[[Batch], Batch] = dict
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return what the module is called with."""
        return {name: value for name, value in batch.items() if name not in self.targets}


LossChoice: TypeAlias = (
    Literal["causal"]
    | ModuleLoss
    | tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]
)
"""What a caller may give for a loss."""


def loss_of(choice: LossChoice) -> ModuleLoss:
    """Return the loss that is meant; ConfigError where it is none."""
    if isinstance(choice, ModuleLoss):
        return choice
    if choice == "causal":
        return CAUSAL
    if isinstance(choice, tuple) and len(choice) == 2 and all(map(callable, choice)):
        return ModuleLoss(sum_of=choice[0], count_of=choice[1])
    raise ConfigError(
        MODULE_LOSS.problem(
            f"loss = {choice!r}", key="loss", suggestions=("loss='causal'", "loss=(sum, count)")
        )
    )


def causal_sum(output: Any, batch: Batch) -> torch.Tensor:
    """Return the sum of token losses; logits are [B, T, V], prepared labels [B, T].

    Logits are the output, or its `logits`; a loss is computed in float32 from narrower ones, as in
    `transformers`.
    """
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    labels: torch.Tensor = batch[LABELS]
    return token_loss_sum(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignored=IGNORED)


def causal_count(batch: Batch) -> int:
    """Return how many tokens are predicted and count, by prepared labels."""
    return int((batch[LABELS] != IGNORED).sum())


def next_labels(batch: Batch) -> Batch:
    """Return the batch with labels [B, T] of the token after each; there is none after the last."""
    if LABELS not in batch:
        raise ConfigError(
            MODULE_LOSS.problem(
                f"the batch has {', '.join(map(repr, batch))} and no {LABELS!r}",
                key="loss",
                suggestions=("batch['labels'] = batch['input_ids']",),
            )
        )
    labels: torch.Tensor = batch[LABELS]
    return {**batch, LABELS: functional.pad(labels[:, 1:], (0, 1), value=IGNORED)}


CAUSAL = ModuleLoss(sum_of=causal_sum, count_of=causal_count, prepare=next_labels)
"""The loss of a language model."""


class TokenLossSum(torch.autograd.Function):
    """Add up -log softmax(logits)[label] over the rows whose label is not `ignored`."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, ignored: int
    ) -> torch.Tensor:
        """Return the sum, in at least float32; keep the logits, and two numbers of each row."""
        counted_N = labels_N != ignored
        local_N1 = torch.where(counted_N, labels_N, 0).unsqueeze(1)
        wide = at_least_fp32(logits_NV.dtype)
        maxima_N1 = logits_NV.amax(1, keepdim=True).to(wide)
        totals_N1 = torch.empty_like(maxima_N1)
        for rows in row_chunks(logits_NV):
            piece = torch.sub(logits_NV[rows], maxima_N1[rows]).exp_()
            torch.sum(piece, dim=1, keepdim=True, out=totals_N1[rows])
        losses_N1 = totals_N1.log() + maxima_N1 - logits_NV.gather(1, local_N1)
        ctx.save_for_backward(logits_NV, local_N1, counted_N, maxima_N1, totals_N1)
        return losses_N1.squeeze(1).masked_fill(~counted_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return factor x (softmax - one-hot) of the rows that count, and zero of the others."""
        logits_NV, local_N1, counted_N, maxima_N1, totals_N1 = ctx.saved_tensors
        factors_N1 = torch.where(counted_N, factor, 0.0).to(maxima_N1.dtype).unsqueeze(1)
        shares_N1 = factors_N1 / totals_N1
        gradient_NV = torch.empty_like(logits_NV)
        widens = maxima_N1.dtype != logits_NV.dtype
        for rows in row_chunks(logits_NV):
            into = None if widens else gradient_NV[rows]
            piece = torch.sub(logits_NV[rows], maxima_N1[rows], out=into)
            piece.exp_().mul_(shares_N1[rows]).scatter_add_(1, local_N1[rows], -factors_N1[rows])
            if widens:
                gradient_NV[rows] = piece
        return gradient_NV, None, None


def token_loss_sum(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, *, ignored: int
) -> torch.Tensor:
    """Return the sum of the losses of tokens whose label is not `ignored`."""
    if is_transformed():
        wide_NV = logits_NV.to(at_least_fp32(logits_NV.dtype))
        return functional.cross_entropy(wide_NV, labels_N, ignore_index=ignored, reduction="sum")
    total: Any = TokenLossSum.apply(logits_NV, labels_N, ignored)
    return total
