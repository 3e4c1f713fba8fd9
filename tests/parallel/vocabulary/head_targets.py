"""What ranks run in tests of the head: loss and gradients, whole and in chunks of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from tests.parallel.targets import Pass, build, own_rows, run_and_record


def head(context: RankContext, argument: tuple[Plan, Any, TokenBatch]) -> Pass:
    """Compute the scaled loss of a stream, and its gradients."""
    return _head(context, argument, TRAINING_PIECES)


def head_in_chunks(context: RankContext, argument: tuple[Plan, Any, TokenBatch]) -> Pass:
    """Do the same for three tokens at a time; say of what sizes its tensors were in `saved`."""
    with Made() as made:
        found = _head(context, argument, PieceSizes(loss_rows=3))
    return replace(found, saved=made.shapes)


def loss_alone(context: RankContext, argument: tuple[Plan, Any, TokenBatch]) -> torch.Tensor:
    """Return the loss that the head of a rank gives where no gradient is asked for."""
    plan, x_ND, batch = argument
    built = build(context, plan, PieceSizes(loss_rows=3))
    stage = next(iter(built.model.stages.values()))
    with torch.no_grad():
        x_ND = own_rows(plan, built.groups, x_ND)
        return stage.operations.head_loss(x_ND, stage.loss_head, batch.labels_N, 0.25)


class Made(TorchDispatchMode):
    """Note the shape of every product that is made in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(result.shape))
        return result


def _head(context: RankContext, argument: tuple[Plan, Any, TokenBatch], pieces: PieceSizes) -> Pass:
    plan, x_ND, batch = argument
    built = build(context, plan, pieces)
    x_ND = own_rows(plan, built.groups, x_ND).requires_grad_()
    stage = next(iter(built.model.stages.values()))

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        loss = stage.operations.head_loss(x_ND, stage.loss_head, batch.labels_N, 0.25)
        return loss, x_ND

    return run_and_record(built, compute, None)
