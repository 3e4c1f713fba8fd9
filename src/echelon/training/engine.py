# SPDX-License-Identifier: Apache-2.0
"""One optimizer step on one rank: forward and backward, reduction, norm, clip, update.

This is the path that is proven and the path that trains. Losses do not depend on the layout: the
sum over all counted tokens of the global batch is divided by their number, which is known on
every rank before backward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar

import torch

from echelon.core.attention_mask import PositionRun
from echelon.core.axis import Axis
from echelon.core.choices.registry import load_reference
from echelon.core.choices.step_parts import STEP_PARTS
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch, start_copy
from echelon.parallel.apply import apply_plan
from echelon.parallel.completion.completion import Completion
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.kernels.compile_marks import CompileMarks
from echelon.parallel.rank_model import GradientExchange, RankModel
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import (
    Shard,
    bucket_shards,
    fill_initial,
    is_first_copy,
    stored_values,
)
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import forward_only, schedule_from_plan
from echelon.training.checkpoint.index import PARAMETERS
from echelon.training.optimizer import MASTER, SliceOptimizer, sum_of_squares
from echelon.training.optimizer.step import learning_rate
from echelon.training.steps.loss_scale import LossScale
from echelon.training.steps.part import NamedShards, ShardsByKind, StepPlace, StepResult, step_parts


class TrainEngine:
    """Hold one rank's part of a run and take steps."""

    computes: ClassVar[bool] = True
    """Whether the rank runs the model; else it has nothing to do before the update."""
    updates: ClassVar[bool] = True
    """Whether the rank updates parameters; else it is given new ones."""
    judges_step: ClassVar[bool] = True
    """Whether all ranks see the same loss and norm, and so whether the run may go on."""
    exchange: ClassVar[GradientExchange] = GradientExchange()
    """Where its gradients go, and its parameters come from."""

    def __init__(
        self,
        plan: Plan,
        recorder: Recorder,
        device: torch.device,
        completion: Completion | None = None,
        *,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Build the part of the recorder's rank; every rank of the mesh must do so together.

        `completion` says when asynchronous operations complete, where not as the transport does;
        what is large is worked through in `pieces`.
        """
        self.pieces = pieces
        self._compiling = CompileMarks.of_plan(plan, recorder.mark)
        whole = plan
        self.groups: RankGroups = rank_groups(plan, recorder, completion)
        plan = self.groups.plan
        self.plan, self.device = plan, device
        has_master = plan.mathematics.precision.has_master
        self.model = self._build(initial=self.updates and not has_master)
        mine = self.model.trained if self.updates else ()
        self.optimizer = SliceOptimizer(
            mine, plan, groups=self.groups, device=device, pieces=pieces
        )
        if has_master and self.updates:
            # Weights are copies of the masters: a rank's own slice, and the rest is gathered.
            kept = {**self._masters(), **self.model.frozen_values()}
            flats = [kept[bucket.name] for bucket in self.model.buckets]
            fill_initial(self.model.buckets, flats, plan, self.groups, device, pieces)
        self.refresh()
        self.model.gathering.settle()
        self.loss_scale = LossScale(plan.mathematics.precision)
        place = StepPlace(
            run=whole,
            plan=plan,
            model=self.model,
            masters=self._masters(),
            groups=self.groups,
            device=device,
        )
        self.parts = step_parts(place, self.loss_scale)
        self.num_updates = 0
        self.schedule = schedule_from_plan(plan)
        self._evaluations: dict[int, Schedule] = {}
        self.on_gradients: Callable[[], None] | None = None
        self.on_launched: Callable[[], None] | None = None
        self.tokens_of_step: Callable[[int], int] = _not_told

    def _build(self, *, initial: bool) -> RankModel:
        """Build what the rank holds of the model, with `initial` weights or with zeros."""
        return apply_plan(
            self.plan,
            self.groups,
            self.device,
            pieces=self.pieces,
            initial=initial,
            exchange=self.exchange,
        )

    @property
    def readers(self) -> Group:
        """The ranks that read a global batch together."""
        return self.groups.data

    @property
    def data_rank(self) -> int:
        """Return which share of the samples of all ranks this one reads."""
        return self.groups.data_rank

    @property
    def _share(self) -> int:
        """Return which share it reads of the samples of a step that ranks take together."""
        return self.groups.data.index // self.plan.mesh.cp

    def runs_for(self, length: int) -> tuple[PositionRun, ...]:
        """Return which positions of sequences of `length` this rank works on."""
        placement = replace(self.plan.placement, length=length)
        return placement.runs(self.plan.mesh.coordinates(self.groups.rank)[Axis.CP])

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

        On a GPU the host waits twice: for the number of tokens, by which losses are divided as they
        are made, and for what all ranks agree on, by which it decides whether to update. A model
        with experts waits for their loads before that, and in each layer for the counts of rows.
        `on_launched` is called when the device has been given all work up to the second.
        """
        self.groups.recorder.waited_s = 0.0
        model, tokens, loss_scale = self.model, self.count_tokens(batches), self.loss_scale.value
        scale = loss_scale / max(1, tokens)
        model.store.start_step()
        model.reduction.start_step()
        losses = self._run(batches, scale)
        model.reduction.finish()
        model.gathering.end_pass()
        if self.on_launched is not None:
            self.on_launched()
        told_by_parts = self.parts.gradients_complete()
        if self.on_gradients is not None:
            self.on_gradients()
        # What several ranks hold counts on the first of them.
        norm_squared = sum_of_squares(
            model.trained if self.updates else (),
            self._counts,
            run_elements=self.pieces.norm_elements,
        )
        told = ToldByRank(
            loss=sum_of(losses) / loss_scale,
            norm_squared=norm_squared,
            stop_requested=stop_requested,
            used_bytes=used_bytes,
            by_parts=told_by_parts,
        )
        rows = agree(told, self.groups, self.device)
        self.groups.recorder.settle()
        # The device has nothing left to do, so this is read at once.
        values = torch.stack(list(losses.values())).tolist() if losses else []
        loss, total_squared, stop_requests = rows.sum(0)[:3].unbind()
        # Every rank has the same norm, so all of them see an overflow that one of them had.
        norm = float(total_squared.sqrt()) / loss_scale
        overflow = bool(loss.isfinite()) and not isfinite(norm)
        report = StepResult(
            step=step + 1,
            loss=float(loss),
            tokens=tokens,
            grad_norm=norm,
            learning_rate=learning_rate(self.plan.mathematics.optimizer, step),
            loss_scale=loss_scale,
            skipped=overflow and self.loss_scale.active,
            stop_requests=int(stop_requests),
            rank_waits_s=tuple(rows[:, 3].tolist()),
            rank_used_bytes=tuple(map(int, rows[:, 4].tolist())),
            microbatch_losses={
                (self._share, index): (value / scale, batches[index].num_valid())
                for index, value in zip(losses, values, strict=True)
            },
        )
        report = self.parts.agreed(report, rows[:, TOLD_BY_ALL:])
        if not report.finite:
            return report
        self._update(report, step)
        return self.parts.end_step(report)

    def _counts(self, bucket: Bucket) -> bool:
        """Return whether the gradient slice of a bucket counts in the norm on this rank."""
        return is_first_copy(bucket, bucket.gradient_slice, self.groups)

    def _run(self, batches: Sequence[TokenBatch], scale: float) -> Mapping[int, torch.Tensor]:
        """Run forward and backward of all microbatches; return losses by microbatch."""
        with self.parts.running(self.loss_scale.value):
            return self.model.executor.run(self.schedule, batches, scale)

    def _update(self, report: StepResult, step: int) -> None:
        """Update unless the step is skipped, and send new values where others read them."""
        clip = self.plan.mathematics.optimizer.clip_norm
        if not report.skipped:
            factor = 1.0 / report.loss_scale
            if clip is not None and report.grad_norm > clip:
                factor *= clip / report.grad_norm
            held_back = self.parts.held_back(step)

            def updated(bucket: Bucket) -> None:
                if bucket.name not in held_back:
                    self._changed(bucket)

            with self.groups.recorder.span("update", "optimizer"):
                self.optimizer.update(report.learning_rate, factor, updated)
                self.model.gathering.end_update()
            self.num_updates += 1
        changed = self.parts.after_update(step, skipped=report.skipped)
        for bucket in changed:
            self._changed(bucket)
        if changed or not report.skipped:
            self.model.gathering.codes.refresh()

    def _changed(self, bucket: Bucket) -> None:
        """Learn that a slice of parameters has its new values."""
        self.parts.updated(bucket)
        self.model.gathering.updated(bucket)

    def begin_validation(self, step: int) -> None:
        """Have the parameters of after `step` steps, where a rank may have older ones."""

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TokenBatch]) -> float:
        """Return the mean loss over the counted tokens of a global batch, without dropout.

        Ranks that step apart have a share of the batch and parameters of their own. Tokens are
        routed as in training, into the same room too; what they chose moves nothing.
        """
        batches = [replace(batch, train=False) for batch in batches]
        tokens = self.count_tokens(batches)
        losses: Mapping[int, torch.Tensor] = {}
        if self.computes:
            if len(batches) not in self._evaluations:
                self._evaluations[len(batches)] = forward_only(self.schedule, len(batches))
            schedule = self._evaluations[len(batches)]
            losses = self.model.executor.run(schedule, batches, 1.0 / max(1, tokens))
        self.model.gathering.end_pass()
        nothing = (0.0,) * self.parts.num_told
        told = ToldByRank(loss=sum_of(losses), norm_squared=0.0, by_parts=nothing)
        loss = float(agree(told, self.groups, self.device).sum(0)[0])
        self.groups.recorder.settle()
        return self.parts.mean_loss(loss, tokens)

    def count_tokens(self, batches: Sequence[TokenBatch]) -> int:
        """Return the counted tokens of the global batch."""
        mine = torch.full((1,), sum(batch.num_valid() for batch in batches), device=self.device)
        counts = self.readers.gather_rows(mine, name="tokens")
        with self.groups.recorder.reading("the number of tokens"):
            return int(counts.sum())

    def parameters(self) -> dict[str, list[Shard]]:
        """Return the parameters that the next forward reads, as this rank keeps them, as views."""
        self.model.gathering.settle()
        buckets = self.model.buckets
        return bucket_shards(buckets, [stored_values(one) for one in buckets], self.groups)

    def masters(self) -> dict[str, list[Shard]]:
        """Return the values that the optimizer updates, as views: the parameters, or copies, and
        what is frozen as it is.

        A rank that updates nothing has none.
        """
        if not self.updates:
            return {}
        if not self.plan.mathematics.precision.has_master:
            return self.parameters()
        return self._shards({**self._masters(), **self.model.frozen_values()})

    def gradients(self) -> dict[str, list[Shard]]:
        """Return the reduced gradients that this rank has, as views; none if it updates nothing.

        They are multiplied by the loss scale until `step` has returned, and by the optimizer's
        factor (clipping, the inverse of the scale) after that where no other dtype is between.
        """
        if not self.updates:
            return {}
        return self._shards({one.name: one.gradient_slice for one in self.model.trained})

    def state(self) -> dict[str, dict[str, list[Shard]]]:
        """Return the optimizer state that this rank holds, as views, by kind."""
        kinds = self.optimizer.state().items()
        return {kind: self._shards(flats) for kind, flats in kinds if kind != MASTER}

    def checkpoint_state(self) -> ShardsByKind:
        """Return the tensors of a rank that the next step depends on, as views, by kind."""
        kinds = {f"optimizer.{kind}": shards for kind, shards in self.state().items()}
        return self.parts.scope.state({PARAMETERS: self.masters(), **kinds, **self.parts.tensors()})

    def shared_state(self) -> NamedShards:
        """Return what ranks that hold the same must agree on, by what an error calls it."""
        return self.parts.shared_state(self.parameters())

    def position(self) -> dict[str, Any]:
        """Return what, beside tensors and the step, the next step depends on, as JSON."""
        return {"num_updates": self.num_updates, **self.parts.position()}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from `position`, the tensors of this engine having been read from a checkpoint."""
        self.num_updates = int(position["num_updates"])
        self.parts.resume(position)
        self.optimizer.set_num_steps(self.num_updates)
        self.refresh()

    def refresh(self, *, slices: bool = False) -> None:
        """Take over values that were written from outside: master copies, codes of slices.

        With `slices`, all of them go to the ranks that gather them.
        """
        masters = self._masters()
        for bucket in self.model.buckets[::-1]:
            if bucket.name in masters:
                bucket.value_slice.copy_(masters[bucket.name])
            if bucket.name in masters or slices:
                self.model.gathering.updated(bucket)
        self.model.gathering.end_update()
        self.model.gathering.codes.refresh()

    def finish(self) -> None:
        """Return when all that was sent has come: a run is over."""
        self.model.gathering.settle()
        self.parts.settle()

    def close(self) -> None:
        """Give back what rests outside of the device; waits for no other rank."""
        self.optimizer.store.close()
        self.model.close()
        if self._compiling is not None:
            self._compiling.close()

    def _shards(self, flats: Mapping[str, torch.Tensor]) -> dict[str, list[Shard]]:
        held = [bucket for bucket in self.model.buckets if bucket.name in flats]
        return bucket_shards(held, [flats[bucket.name] for bucket in held], self.groups)

    def _masters(self) -> Mapping[str, torch.Tensor]:
        """Return the master copies by bucket; a rank without parameters has none."""
        return self.optimizer.state().get(MASTER, {})


def _not_told(step: int) -> int:
    raise AssertionError(f"nobody says how many tokens step {step} has")


def make_engine(plan: Plan, recorder: Recorder, *args: Any, **named: Any) -> TrainEngine:
    """Return the engine of the recorder's rank; the arguments are those of `TrainEngine`."""
    kind: type[TrainEngine] = TrainEngine
    for record in STEP_PARTS.values():
        if record.engine:
            kind = load_reference(record.engine)(plan, recorder.rank) or kind
    return kind(plan, recorder, *args, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldByRank:
    """Facts of a step that a rank gives to all others."""

    loss: torch.Tensor | float
    """Part of the loss."""
    norm_squared: torch.Tensor | float
    """Sum of the squares of gradients that count on the rank."""
    stop_requested: bool = False
    """True if the rank was asked to stop."""
    used_bytes: int = 0
    """Memory that the rank uses."""
    by_parts: Sequence[float] = ()
    """Numbers of step parts."""


TOLD_BY_ALL = 5
"""Numbers of a row before the numbers of step parts."""


def agree(told: ToldByRank, groups: RankGroups, device: torch.device) -> torch.Tensor:
    """Return a row of each rank [ranks, 5 + by_parts]: loss, squares, stop, seconds waited, bytes.

    Losses are summed over everything but the tensor ranks (they hold the same loss), squares over
    one replica: whole gradients on one data rank, slices on those of one replica. A copy adds
    nothing, unless it alone is not finite: no rank may update then.
    """
    known = torch.tensor(
        [
            float(told.stop_requested),
            groups.recorder.waited_s,
            float(told.used_bytes),
            *told.by_parts,
        ],
        dtype=torch.float64,
    )
    loss = told.loss if groups.tensor.index == 0 else 0.0
    sums = torch.stack([_float64(one, device) for one in (loss, told.norm_squared)])
    rows = groups.world.gather_rows(torch.cat([sums, start_copy(known, device)]), name="step")
    with groups.recorder.reading("the sums of all ranks"):
        return rows.cpu()


def sum_of(losses: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of microbatches on the device; 0 on ranks that have none."""
    return torch.stack(list(losses.values())).sum().double() if losses else torch.zeros(())


def _float64(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return a number on the device without waiting for it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
