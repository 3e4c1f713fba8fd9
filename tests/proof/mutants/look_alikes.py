"""Bugs that look like another one in the first wrong tensor: what they do elsewhere tells them.

Degrees are alike on purpose: a factor of 2 is that of data ranks, tensor ranks and microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.operations import LossHead
from echelon.parallel.operations import RankOperations
from echelon.training.optimizer.elementwise import AdamW
from echelon.training.optimizer.trained_ranges import FusedOperands, OnePassOperands
from tests.proof.mutants.planting import Told, change_hops, mutant

ALIKE = {"dp": 2, "tp": 2, "accumulation": 2}


@mutant(
    Told(
        "prove-gradients",
        "norm.weight",
        "tp",
        "tp",
        plan={**ALIKE, "sequence_parallel": True},
    ),
)
def norms_summed_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum gradients of norms over tensor ranks once more: data ranks would double all gradients."""
    change_hops(
        patch,
        lambda kind, hops, groups: [hop for hop in hops for _ in range(1 + (hop.axis == "tp"))],
    )


@mutant(Told("prove-microbatch-loss", "head.weight", "2"))
def logits_doubled(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Multiply logits by 2: a last norm twice as large has the same loss, and another output."""
    loss = RankOperations.head_loss

    def changed(self: Any, x: torch.Tensor, head: LossHead, *rest: Any) -> torch.Tensor:
        return loss(self, x, replace(head, factor=2 * head.factor), *rest)

    patch.setattr(RankOperations, "head_loss", changed)


def _scaled_gradients(patch: pytest.MonkeyPatch, factor: float) -> None:
    update, in_one_pass = AdamW.update, AdamW.update_in_one_pass

    def changed(self: AdamW, operands: FusedOperands) -> None:
        for gradient in operands.gradients:
            gradient.mul_(factor)
        update(self, operands)
        for gradient in operands.gradients:
            gradient.div_(factor)

    def changed_in_one_pass(self: AdamW, operands: OnePassOperands) -> None:
        operands.gradient.mul_(factor)
        in_one_pass(self, operands)
        operands.gradient.div_(factor)

    patch.setattr(AdamW, "update", changed)
    patch.setattr(AdamW, "update_in_one_pass", changed_in_one_pass)


@mutant(Told("prove-clipped-update", "embedding.weight", "1/dp", "dp", plan={"dp": 2}))
def optimizer_averages_over_replicas(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide clipped gradients by the data ranks: an epsilon twice as large looks alike."""
    _scaled_gradients(patch, 1 / plan.mesh.dp)
