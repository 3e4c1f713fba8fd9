"""Our engine on one GPU that all ranks share: a subject, and a short run told as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.transport.collectives import Group
from echelon.proof.oracle.batches import global_batch
from echelon.proof.subject import ProofBatch
from echelon.schedule.action import ActionKind
from echelon.training.subject import EngineReport, EngineSubject, storage_bytes

NUM_STEPS = 3


class GpuSubject(EngineSubject):
    """The engine whose tensors are all on the GPU."""

    def __init__(self, plan: Plan, place: RankContext) -> None:
        """Build this rank's part on the first GPU."""
        self.device = torch.device("cuda", 0)
        super().__init__(plan, replace(place, device=self.device))
        copy_through_host(self.engine.groups)

    def step(self, batch: ProofBatch, step: int) -> EngineReport:
        """Take one optimizer step; the tokens are moved first."""
        moved = replace(
            batch,
            inputs_BT=batch.inputs_BT.to(self.device),
            labels_BT=batch.labels_BT.to(self.device),
        )
        return super().step(moved, step)

    def mistimed(self) -> list[str]:
        """Return the actions of the last step that did not run between its begin and now."""
        now, actions = self.engine.groups.recorder.now(), set(ActionKind)
        return [
            one.name
            for one in self.events.events
            if one.kind in actions and not 0.0 <= one.start < one.end <= now
        ]

    def strays(self) -> list[str]:
        """Return the flat tensors that hold memory and are not on the GPU."""
        return [
            f"{bucket.name}.{kind}"
            for bucket in self.engine.model.buckets
            for kind in ("values", "gradients", "value_slice", "gradient_slice")
            for flat in [getattr(bucket, kind)]
            if flat is not None and storage_bytes([flat]) and flat.device != self.device
        ]


def copy_through_host(groups: RankGroups) -> None:
    """Let Gloo's own collectives serve: they copy through the host, its messages cannot.

    Echelon gives a GPU to NCCL; only ranks that share one talk over Gloo, and only here.
    """
    for field in dataclasses.fields(groups):
        group = getattr(groups, field.name)
        if isinstance(group, Group) and group.communicator is not None:
            group.communicator.is_gloo = False


def build(place: RankContext, plan: Plan) -> GpuSubject:
    """Return this rank of `plan` as a subject."""
    return GpuSubject(plan, place)


def train(context: RankContext, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Take a few steps; return losses, norms, the sum of all parameters, and what strayed."""
    plan = Plan.from_json(argument["plan"])
    subject = GpuSubject(plan, context)
    try:
        reports = [subject.step(global_batch(plan, step), step) for step in range(NUM_STEPS)]
        shards = subject.parameters()
        return {
            "losses": [report.loss for report in reports],
            "norms": [report.grad_norm for report in reports],
            "parameters": {
                name: float(sum(one.tensor.double().sum().cpu() for one in held))
                for name, held in shards.items()
            },
            "strays": subject.strays(),
            "mistimed": subject.mistimed(),
        }
    finally:
        subject.close()
