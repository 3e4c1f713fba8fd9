# SPDX-License-Identifier: Apache-2.0
"""Which positions of a batch a context rank has, and what it is told of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_ATTENTION, MODULE_BATCH
from echelon.parallel.module.loss import Batch

POSITIONS, PADDING = "position_ids", "attention_mask"


class SequenceCut:
    """Cut the sequences of a prepared batch: labels are those of the next tokens already."""

    def __init__(self, plan: Plan, model: nn.Module, cp_rank: int) -> None:
        """Take the positions of context rank `cp_rank`."""
        self._length = plan.mathematics.sequence_length
        self._mine = torch.tensor(plan.placement.positions(cp_rank))
        takes = inspect.signature(model.forward).parameters
        self._tells = {name for name in (POSITIONS, PADDING) if name in takes}

    def whole(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as the module is given it without a cut.

        ConfigError where a sequence has padding, positions of its own, or another length.
        """
        given = dict(batch)
        padding = given.pop(PADDING, None)
        positions = given.pop(POSITIONS, None)
        if padding is not None and not bool((padding != 0).all()):
            raise _unfit(f"{PADDING} hides tokens")
        if positions is not None and not bool((positions == torch.arange(self._length)).all()):
            raise _unfit(f"{POSITIONS} are not 0 to {self._length - 1}")
        tensors = [one for one in given.values() if isinstance(one, torch.Tensor) and one.dim() > 1]
        if not any(one.shape[1] == self._length for one in tensors):
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
            raise ConfigError(
                MODULE_BATCH.problem(
                    f"the plan cuts sequences of {self._length} positions, not {shapes}",
                    key="batch.sequence_length",
                )
            )
        if any(self._length in one.shape[2:] for one in tensors):
            raise _unfit("a tensor of the batch has positions beyond its second dim")
        return given

    def cut(self, batch: Batch) -> dict[str, Any]:
        """Return this rank's positions of a batch, and tell the module which these are."""
        given = self.whole(batch)
        mine: dict[str, Any] = {}
        rows = 0
        for name, one in given.items():
            cut = isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[1] == self._length
            mine[name] = one[:, self._mine.to(one.device)] if cut else one
            rows = max(rows, len(one)) if cut else rows
        like = next(one for one in given.values() if isinstance(one, torch.Tensor))
        places = self._mine.to(like.device).expand(rows, -1)
        if POSITIONS in self._tells:
            mine[POSITIONS] = places
        if PADDING in self._tells:
            # Without it, transformers takes jumps of positions for several documents.
            mine[PADDING] = torch.ones_like(places)
        return mine

    def rows(self, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions of an output [B, T, ...] of the whole module."""
        return output[:, self._mine.to(output.device)]


def _unfit(why: str) -> ConfigError:
    return ConfigError(MODULE_ATTENTION.problem(why, key="mesh.cp", suggestions=("mesh.cp = 1",)))
