"""One optimizer step on one rank: forward and backward, reduction, norm, clip, update.

This is the path that is proven and the path that trains. Losses do not depend on the layout: the
sum over all counted tokens of the global batch is divided by their number, which is known on
every rank before backward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.parallel.apply import RankModel, apply_plan
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.recorder import Recorder
from echelon.parallel.shards import Shard
from echelon.parallel.weights import bucket_shards
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.train.learning_rate import learning_rate
from echelon.train.optimizer import FlatAdamW, local_norm_squared, scale_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Hold what the ranks told one another at the end of a step, bitwise the same on each."""

    loss: float
    grad_norm: float
    stop_requests: int
    rank_waits_s: tuple[float, ...]
    rank_used_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Say what one step did; loss, tokens, grad_norm and flags are the same on every rank.

    `microbatch_losses` maps (data rank, microbatch) to (loss sum, counted tokens) of what this
    rank computed; `stop_requests` counts the ranks that asked to stop. `rank_waits_s` are the
    seconds that each rank waited for others until its gradients were complete (the one that
    waited least is the one that the others waited for), `rank_used_bytes` the memory that each
    said it uses.
    """

    loss: float
    tokens: int
    grad_norm: float
    learning_rate: float
    stop_requests: int
    rank_waits_s: tuple[float, ...]
    rank_used_bytes: tuple[int, ...]
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]

    @property
    def finite(self) -> bool:
        """Return whether the step was one that an optimizer may follow."""
        return all(abs(value) < float("inf") for value in (self.loss, self.grad_norm))


class TrainEngine:
    """Hold one rank's part of a run and take steps."""

    def __init__(self, plan: Plan, recorder: Recorder, device: torch.device) -> None:
        """Build the part of the recorder's rank; every rank of the mesh must do so together."""
        self.plan = plan
        self.groups: RankGroups = rank_groups(plan.mesh, recorder, tied=plan.model.tied)
        self.model: RankModel = apply_plan(plan, self.groups, device)
        self.optimizer = FlatAdamW(self.model.buckets, plan.mathematics.optimizer)
        self.schedule = build_schedule(
            plan.layout.pipeline.schedule,
            num_stages=plan.num_stages,
            num_ranks=plan.mesh.pp,
            num_microbatches=plan.num_microbatches,
        )
        self.on_gradients: Callable[[], None] | None = None

    @property
    def data_rank(self) -> int:
        """Return which share of the samples this rank reads."""
        return self.groups.data.index

    def step(
        self,
        batches: Sequence[TokenBatch],
        step: int,
        *,
        stop_requested: bool = False,
        used_bytes: int = 0,
    ) -> StepResult:
        """Take optimizer step `step` on this rank's microbatches; tell the others what it uses.

        The parameters are left alone when the loss or the norm is not finite; the caller looks at
        `finite` and ends the run.
        """
        self.groups.recorder.waited_s = 0.0
        model, tokens = self.model, self.count_tokens(batches)
        scale = 1.0 / max(1, tokens)
        model.store.start_step()
        losses = model.executor.run(self.schedule, batches, scale)
        model.reduction.finish()
        if self.on_gradients is not None:
            self.on_gradients()
        mine = float(torch.stack(list(losses.values())).sum()) if losses else 0.0
        said = self._agree(
            mine, local_norm_squared(model.buckets), stop_requested, used_bytes=used_bytes
        )
        norm = said.grad_norm
        settings = self.plan.mathematics.optimizer
        rate = learning_rate(settings, step)
        report = StepResult(
            loss=said.loss,
            tokens=tokens,
            grad_norm=norm,
            learning_rate=rate,
            stop_requests=said.stop_requests,
            rank_waits_s=said.rank_waits_s,
            rank_used_bytes=said.rank_used_bytes,
            microbatch_losses={
                (self.data_rank, index): (float(value) / scale, batches[index].num_valid())
                for index, value in losses.items()
            },
        )
        if report.finite:
            start = self.groups.recorder.now()
            if settings.clip_norm is not None and norm > settings.clip_norm:
                scale_gradients(model.buckets, settings.clip_norm / norm)
            self.optimizer.update(rate)
            self.groups.recorder.record("update", "optimizer", start=start)
        return report

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TokenBatch]) -> float:
        """Return the mean loss over the counted tokens of a global batch, without dropout."""
        batches = [replace(batch, train=False) for batch in batches]
        tokens = self.count_tokens(batches)
        schedule = forward_only(self.schedule, len(batches))
        losses = self.model.executor.run(schedule, batches, 1.0 / max(1, tokens))
        mine = float(torch.stack(list(losses.values())).sum()) if losses else 0.0
        return self._agree(mine, 0.0, stop_requested=False).loss

    def count_tokens(self, batches: Sequence[TokenBatch]) -> int:
        """Return the counted tokens of the global batch."""
        mine = torch.tensor([sum(batch.num_valid() for batch in batches)])
        mine = mine.to(next(self.model.stage.parameters()).device)
        return int(self.groups.data.gather_rows(mine, name="tokens").sum())

    def parameters(self) -> dict[str, list[Shard]]:
        """Return the parameters that this rank holds, as views."""
        flats = [bucket.values for bucket in self.model.buckets]
        return bucket_shards(self.model.buckets, flats, self.groups)

    def gradients(self) -> dict[str, list[Shard]]:
        """Return the gradients in the buckets, as views (clipped once `step` has returned)."""
        flats = [bucket.gradients for bucket in self.model.buckets]
        return bucket_shards(self.model.buckets, flats, self.groups)

    def moments(self) -> dict[str, dict[str, list[Shard]]]:
        """Return the optimizer state that this rank holds, as views, by kind."""
        return {
            kind: bucket_shards(self.model.buckets, flats, self.groups)
            for kind, flats in self.optimizer.moments.items()
        }

    def _agree(
        self, loss: float, norm_squared: float, stop_requested: bool, *, used_bytes: int = 0
    ) -> Agreement:
        """Exchange all that every rank must know of a step, in one small all-gather.

        Losses are summed over everything but the tensor ranks (they hold the same loss), squares
        over one replica.
        """
        groups, mesh = self.groups, self.plan.mesh
        here = mesh.coordinates(groups.rank)
        row = torch.tensor(
            [
                loss if here[Axis.TP] == 0 else 0.0,
                norm_squared if groups.data.index == 0 else 0.0,
                float(stop_requested),
                groups.recorder.waited_s,
                float(used_bytes),
            ],
            dtype=torch.float64,
            device=next(self.model.stage.parameters()).device,
        )
        rows = groups.world.gather_rows(row, name="step").cpu()
        total = rows.sum(0)
        return Agreement(
            loss=float(total[0]),
            grad_norm=float(total[1].sqrt()),
            stop_requests=int(total[2]),
            rank_waits_s=tuple(float(value) for value in rows[:, 3]),
            rank_used_bytes=tuple(int(value) for value in rows[:, 4]),
        )


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return the evaluation of `num_microbatches` on the stages of `schedule`."""
    return Schedule(
        name=f"{schedule.name} (forward)",
        num_ranks=schedule.num_ranks,
        num_microbatches=num_microbatches,
        stage_ranks=schedule.stage_ranks,
        actions=tuple(
            tuple(
                Action(ActionKind.F, stage, microbatch)
                for microbatch in range(num_microbatches)
                for stage in schedule.stages_of(rank)
            )
            for rank in range(schedule.num_ranks)
        ),
    )
