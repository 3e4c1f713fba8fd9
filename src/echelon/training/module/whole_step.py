# SPDX-License-Identifier: Apache-2.0
"""A step that takes a global batch: microbatches, one denominator, forward and backward.

batch = {"input_ids": ids, "labels": ids}       # the same on every rank
report = optimizer.backward(batch)              # report.loss, report.count
optimizer.step()
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from echelon.core.errors import ConfigError, RunFailed
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_BATCH, MODULE_LOSS
from echelon.parallel.module.context import ModuleContext, SequenceCut
from echelon.parallel.module.loss import Batch, ModuleLoss
from echelon.parallel.module.module import RankModule
from echelon.parallel.module.pipeline.build import PipelineModule
from echelon.parallel.module.pipeline.stage import ModuleMicrobatch
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import forward_only


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """Say what the loss of a global batch is, the same on every rank: a sum over its count."""

    loss: float
    count: int


class BatchRunner(Protocol):
    """Whoever runs the microbatches of this rank."""

    def run(
        self, microbatches: Sequence[ModuleMicrobatch], scale: float, *, train: bool
    ) -> Sequence[torch.Tensor]:
        """Return scale x the loss sums that were computed here; with gradients where it trains."""
        ...


class LoopRunner:
    """Run microbatches one after the other through the whole module."""

    def __init__(
        self, module: RankModule, loss: ModuleLoss, context: ModuleContext | None = None
    ) -> None:
        """Run the module of this rank, over its positions where there is a `context`."""
        self._module, self._loss = module, loss
        self._call: Callable[..., Any] = context or module.model

    def run(
        self, microbatches: Sequence[ModuleMicrobatch], scale: float, *, train: bool
    ) -> Sequence[torch.Tensor]:
        """Return scale x the loss sum of each."""
        losses: list[torch.Tensor] = []
        for one in microbatches:
            with torch.set_grad_enabled(train):
                with self._loss.around():
                    output = self._call(**self._loss.inputs(one.batch))
                total = self._loss.sum_of(output, one.batch) * scale
            del output
            losses.append(total.detach())
            if not train:
                continue
            if one.index == len(microbatches) - 1:
                total.backward()
            else:
                with self._module.passes.no_sync():
                    total.backward()
        return losses


class PipelineRunner:
    """Run microbatches in the order of a schedule."""

    def __init__(self, pipeline: PipelineModule) -> None:
        self._pipeline = pipeline
        self._evaluations: dict[int, Schedule] = {}

    def run(
        self, microbatches: Sequence[ModuleMicrobatch], scale: float, *, train: bool
    ) -> Sequence[torch.Tensor]:
        """Return scale x the loss sums of this rank, where it has the last stage."""
        pipeline, count = self._pipeline, len(microbatches)
        schedule = pipeline.schedule
        if train:
            pipeline.begin_step()
        elif count not in self._evaluations:
            self._evaluations[count] = forward_only(schedule, count)
        schedule = schedule if train else self._evaluations[count]
        inputs: Any = microbatches
        with torch.set_grad_enabled(train):
            losses = pipeline.executor.run(schedule, inputs, scale)
        if not train:
            pipeline.module.gathering.end_pass()
        return list(losses.values())


class WholeSteps:
    """Cut global batches, count them, and run this rank's part."""

    def __init__(
        self,
        module: RankModule,
        loss: ModuleLoss,
        runner: BatchRunner,
        sequences: SequenceCut | None = None,
    ) -> None:
        """Run the part of this rank by `runner`; `sequences` cuts those of a microbatch."""
        self._module, self._loss, self._runner = module, loss, runner
        self._sequences = sequences

    def run(self, batch: Batch, loss_scale: float, *, train: bool) -> BatchLoss:
        """Run a global batch; return its loss. RunFailed where ranks were given different ones."""
        plan, groups = self._module.plan, self._module.groups
        shares = cut(plan, self._loss.prepare(batch))
        count = sum(self._loss.count_of(one) for share in shares for one in share)
        self._agree(batch, count)
        device = self._module.device
        mine = [
            ModuleMicrobatch(index=index, batch=_moved(self._mine(one), device))
            for index, one in enumerate(shares[groups.data.index // plan.mesh.cp])
        ]
        scale = loss_scale / max(1, count)
        losses = self._runner.run(mine, scale, train=train)
        total = torch.zeros((1,), dtype=torch.float64, device=device)
        # Tensor ranks have the same losses, which count once.
        for one in losses if groups.tensor.index == 0 else ():
            total += one.double()
        totals = groups.world.gather_rows(total, name="loss")
        with groups.recorder.reading("the loss"):
            return BatchLoss(loss=float(totals.sum()) / loss_scale, count=count)

    def _mine(self, batch: Batch) -> Batch:
        return batch if self._sequences is None else self._sequences.cut(batch)

    def _agree(self, batch: Batch, count: int) -> None:
        world = self._module.groups.world
        row = torch.tensor([count, checksum(batch)], dtype=torch.int64, device=self._module.device)
        rows = world.gather_rows(row, name="batch").cpu()
        for rank, other in enumerate(rows.tolist()):
            if other != rows[0].tolist():
                raise RunFailed(
                    MODULE_BATCH.problem(
                        f"ranks 0 and {rank} were given different batches, which count "
                        f"{int(rows[0, 0])} and {other[0]}"
                    )
                )


def cut(plan: Plan, batch: Batch) -> list[list[dict[str, Any]]]:
    """Return the microbatches of each data rank of a global batch.

    Tensors whose first dim has as many entries as the plan has samples are cut; those of one entry,
    and what is no tensor, are the same for all. ConfigError where there are other numbers.
    """
    total, each = plan.mathematics.global_sequences, plan.layout.microbatch_sequences
    cuts = {n for n, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() and len(v) != 1}
    if total == 1:
        cuts = {n for n, v in batch.items() if isinstance(v, torch.Tensor) and v.dim()}
    wrong = [name for name in cuts if len(batch[name]) != total]
    if wrong or not cuts:
        sizes = ", ".join(f"{name} has {len(batch[name])}" for name in wrong) or "no tensor has any"
        raise ConfigError(
            MODULE_BATCH.problem(
                f"the plan takes global batches of {total} samples, and {sizes}",
                key="batch.global_sequences",
                suggestions=(f"batch.global_sequences = {len(batch[wrong[0]])}",) if wrong else (),
            )
        )
    count = plan.num_microbatches

    def part(place: int) -> dict[str, Any]:
        rows = slice(place * each, (place + 1) * each)
        return {name: one[rows] if name in cuts else one for name, one in batch.items()}

    return [
        [part(share * count + index) for index in range(count)] for share in range(plan.mesh.dp)
    ]


def checksum(batch: Batch) -> int:
    """Return a number that differs where tensors of batches do."""
    found = 0
    for name in sorted(batch):
        if isinstance(one := batch[name], torch.Tensor):
            flat: Any = one.detach().cpu().contiguous().view(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), found)
    return found


def no_loss() -> ConfigError:
    """Return the error of a step of ours where no loss was given."""
    return ConfigError(
        MODULE_LOSS.problem(
            "optimizer.backward takes a global batch, and parallelize was given no loss",
            key="loss",
            suggestions=("parallelize(..., loss='causal')", "loss.backward() in a loop of yours"),
        )
    )


def _moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {
        name: one.to(device) if isinstance(one, torch.Tensor) else one
        for name, one in batch.items()
    }
