# SPDX-License-Identifier: Apache-2.0
"""The loss of one's own module: a sum, and what it is divided by.

The mean of means is not the mean: microbatches and data ranks may count different numbers of
tokens. So a loss is two functions. The sum is of the module's output and a microbatch; the count is
of the microbatch alone, as the counts of all are added up before the first backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import functional

from echelon.core.errors import ConfigError
from echelon.core.rulebook.module import MODULE_LOSS
from echelon.parallel.module.token_losses import token_loss_sum

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
