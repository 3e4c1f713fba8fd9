# SPDX-License-Identifier: Apache-2.0
"""One optimizer step on one rank: forward and backward, reduction, norm, clip, update.

This is the path that is proven and the path that trains. Losses do not depend on the layout: the
sum over all counted tokens of the global batch is divided by their number, which is known on
every rank before backward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar

import torch

from echelon.core.attention_mask import PositionRun
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.layout.islands import plan_and_rank
from echelon.models.batch import TokenBatch
from echelon.models.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.parallel.apply import apply_plan
from echelon.parallel.buckets import Bucket
from echelon.parallel.completion.completion import Completion
from echelon.parallel.expert import LayerLoad
from echelon.parallel.kernels.compile_marks import CompileMarks
from echelon.parallel.rank_model import RankModel
from echelon.parallel.servers.server import server_model
from echelon.parallel.transport.device_mesh import RankGroups, rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.parallel.weights import (
    Shard,
    bucket_shards,
    fill_initial,
    is_first_copy,
    server_shards,
    stored_values,
)
from echelon.schedule.action import Schedule
from echelon.schedule.forward import forward_only
from echelon.schedule.from_plan import schedule_from_plan
from echelon.training.agreement import ToldByRank, agree, sum_of
from echelon.training.expert_state import ExpertState, expert_state, reports_routing
from echelon.training.learning_rate import learning_rate
from echelon.training.local_sgd import OuterSteps
from echelon.training.loss_scale import LossScale
from echelon.training.observer import StepFacts
from echelon.training.optimizer import MASTER, SliceOptimizer, sum_of_squares
from echelon.training.routing import RoutingSummary, routing_row

FP8_SCALES = "fp8_scales"
"""Key of the largest numbers of steps before, in what a checkpoint says of a position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(StepFacts):
    """Say what one step did; loss, tokens, grad_norm and flags are the same on every rank."""

    stop_requests: int
    """Ranks that asked to stop."""
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    """(data rank, microbatch) -> (sum of losses, counted tokens) of what this rank computed, its
    positions only."""

    @property
    def finite(self) -> bool:
        """Return whether the run may go on: all is finite, or an overflow that the scale mends."""
        return isfinite(self.loss) and (self.skipped or isfinite(self.grad_norm))


class TrainEngine:
    """Hold one rank's part of a run and take steps."""

    outer_kind: ClassVar[type[OuterSteps]] = OuterSteps
    """What takes the outer steps of an island of local SGD."""

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
        self._pieces = pieces
        self._compiling = CompileMarks.of_plan(plan, recorder.mark)
        whole = plan
        self.groups: RankGroups = rank_groups(plan, recorder, completion)
        plan, _ = plan_and_rank(plan, recorder.rank)
        self.plan, self.device = plan, device
        has_master = plan.mathematics.precision.has_master
        self.is_server = plan.mesh.is_server(recorder.rank)
        # Servers, where there are any, update everything, and workers begin with what they have.
        self._updates = not plan.mesh.servers or self.is_server
        build = server_model if self.is_server else apply_plan
        self.model: RankModel = build(
            plan, self.groups, device, pieces=pieces, initial=self._updates and not has_master
        )
        mine = self.model.trained if self._updates else ()
        self.optimizer = SliceOptimizer(
            mine, plan, groups=self.groups, device=device, pieces=pieces
        )
        if has_master and self._updates:
            # Weights are copies of the masters: a rank's own slice, and the rest is gathered.
            kept = {**self._masters(), **self.model.frozen_values()}
            flats = [kept[bucket.name] for bucket in self.model.buckets]
            fill_initial(self.model.buckets, flats, plan, self.groups, device)
        self.refresh()
        self.model.gathering.settle()
        self.outer: OuterSteps | None = None
        if whole.mathematics.local_sgd.active:
            masters = self._masters() if has_master else {}
            self.outer = self.outer_kind(whole, self.model.buckets, masters, self.groups, device)
        self.loss_scale = LossScale(plan.mathematics.precision)
        self.num_updates = 0
        self.schedule = schedule_from_plan(plan)
        self._evaluations: dict[int, Schedule] = {}
        self.on_gradients: Callable[[], None] | None = None
        self.on_launched: Callable[[], None] | None = None

    @property
    def data_rank(self) -> int:
        """Return which share of the samples of all ranks this one reads."""
        return self.groups.islands.index * self.plan.mesh.dp + self._share

    @property
    def _share(self) -> int:
        """Return which share of the samples of its island it reads."""
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
        if model.balancer is not None:
            model.balancer.start_step(loss_scale)
        losses = self._run(batches, scale)
        model.reduction.finish()
        model.gathering.end_pass()
        if self.on_launched is not None:
            self.on_launched()
        loads = {} if model.balancer is None else model.balancer.finish()
        if self.on_gradients is not None:
            self.on_gradients()
        # What several ranks hold counts on the first of them.
        norm_squared = sum_of_squares(
            model.trained if self._updates else (),
            lambda one: self.is_server or is_first_copy(one, one.gradient_slice, self.groups),
            run_elements=self._pieces.norm_elements,
        )
        told = ToldByRank(loss=sum_of(losses) / loss_scale, norm_squared=norm_squared)
        told = replace(told, stop_requested=stop_requested, used_bytes=used_bytes)
        rows = agree(replace(told, routing=self._routing(loads)), self.groups, self.device)
        self.groups.recorder.settle()
        # The device has nothing left to do, so this is read at once.
        values = torch.stack(list(losses.values())).tolist() if losses else []
        loss, total_squared, stop_requests = rows.sum(0)[:3].unbind()
        asked = int(stop_requests)
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
            stop_requests=asked if self.outer is None else self.outer.stop_requests(step, asked),
            rank_waits_s=tuple(rows[:, 3].tolist()),
            rank_used_bytes=tuple(map(int, rows[:, 4].tolist())),
            routing=None if model.balancer is None else RoutingSummary.from_rows(rows[:, 5:]),
            loads=loads,
            microbatch_losses={
                (self._share, index): (value / scale, batches[index].num_valid())
                for index, value in zip(losses, values, strict=True)
            },
        )
        if report.finite:
            self._update(report, step)
            self.loss_scale.after(overflowed=report.skipped)
            if model.scales is not None:
                model.scales.end_step(model.buckets, self.groups)
        return report

    def _run(self, batches: Sequence[TokenBatch], scale: float) -> Mapping[int, torch.Tensor]:
        """Run forward and backward of all microbatches; return losses by microbatch."""
        if self.is_server:
            return {}
        with nullcontext() if self.model.scales is None else self.model.scales.training():
            return self.model.executor.run(self.schedule, batches, scale)

    def _update(self, report: StepResult, step: int) -> None:
        """Take the inner step, unless it is skipped, and what a round of local SGD asks for."""
        clip, outer = self.plan.mathematics.optimizer.clip_norm, self.outer
        if not report.skipped:
            factor = 1.0 / report.loss_scale
            if clip is not None and report.grad_norm > clip:
                factor *= clip / report.grad_norm

            def updated(bucket: Bucket) -> None:
                # What is read for an outer step, or changed by it, is sent after it.
                if outer is None or not outer.touches(bucket, step):
                    self._updated(bucket)

            with self.groups.recorder.span("update", "optimizer"):
                self.optimizer.update(report.learning_rate, factor, updated)
                self.model.gathering.end_update()
                if self.model.balancer is not None:
                    self.model.balancer.update()
            self.num_updates += 1
        changed = () if outer is None else outer.end_step(step, updated=not report.skipped)
        for bucket in changed:
            self._updated(bucket)
        if changed or not report.skipped:
            self.model.codes.refresh()

    def _updated(self, bucket: Bucket) -> None:
        """Learn that a slice of parameters has its new values."""
        if self.model.scales is not None:
            self.model.scales.note_weights(bucket, self.groups)
        self.model.gathering.updated(bucket)

    def begin_validation(self, step: int) -> None:
        """Have the parameters of after `step` steps, where a rank may have older ones."""

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TokenBatch]) -> float:
        """Return the mean loss over the counted tokens of a global batch, without dropout.

        Islands of local SGD have a share of the batch and parameters of their own. Tokens are
        routed as in training, into the same room too; what they chose moves nothing.
        """
        batches = [replace(batch, train=False) for batch in batches]
        tokens = self.count_tokens(batches)
        losses: Mapping[int, torch.Tensor] = {}
        if not self.is_server:
            if len(batches) not in self._evaluations:
                self._evaluations[len(batches)] = forward_only(self.schedule, len(batches))
            schedule = self._evaluations[len(batches)]
            losses = self.model.executor.run(schedule, batches, 1.0 / max(1, tokens))
        self.model.gathering.end_pass()
        told = ToldByRank(loss=sum_of(losses), norm_squared=0.0, routing=self._routing({}))
        loss = float(agree(told, self.groups, self.device).sum(0)[0])
        self.groups.recorder.settle()
        return loss if self.outer is None else self.outer.mean_loss(loss, tokens)

    def _routing(self, loads: Mapping[int, LayerLoad]) -> Sequence[float]:
        if self.model.balancer is None:
            return ()
        return routing_row(loads, reports=reports_routing(self.groups))

    def count_tokens(self, batches: Sequence[TokenBatch]) -> int:
        """Return the counted tokens of the global batch."""
        mine = torch.full((1,), sum(batch.num_valid() for batch in batches), device=self.device)
        group = self.groups.servers if self.plan.mesh.servers else self.groups.data
        counts = group.gather_rows(mine, name="tokens")
        with self.groups.recorder.reading("the number of tokens"):
            return int(counts.sum())

    def parameters(self) -> dict[str, list[Shard]]:
        """Return the parameters that the next forward reads, as this rank keeps them, as views."""
        self.model.gathering.settle()
        buckets = self.model.buckets
        if self.is_server:
            values = [one.value_slice for one in buckets]
            return server_shards(buckets, values, self.groups, primary=False)
        return bucket_shards(buckets, [stored_values(one) for one in buckets], self.groups)

    def masters(self) -> dict[str, list[Shard]]:
        """Return the values that the optimizer updates, as views: the parameters, or copies, and
        what is frozen as it is.

        Workers of servers have none.
        """
        if not self._updates:
            return {}
        if not self.plan.mathematics.precision.has_master:
            if self.is_server:
                return self._shards({one.name: one.value_slice for one in self.model.buckets})
            return self.parameters()
        return self._shards({**self._masters(), **self.model.frozen_values()})

    def gradients(self) -> dict[str, list[Shard]]:
        """Return the reduced gradients that this rank has, as views: workers of servers none.

        They are multiplied by the loss scale until `step` has returned, and by the optimizer's
        factor (clipping, the inverse of the scale) after that where no other dtype is between.
        """
        if not self._updates:
            return {}
        return self._shards({one.name: one.gradient_slice for one in self.model.trained})

    def state(self) -> dict[str, dict[str, list[Shard]]]:
        """Return the optimizer state that this rank holds, as views, by kind."""
        kinds = self.optimizer.state().items()
        return {kind: self._shards(flats) for kind, flats in kinds if kind != MASTER}

    def outer_state(self) -> dict[str, dict[str, list[Shard]]]:
        """Return what islands of local SGD agree on, as views, by kind; nothing without them."""
        if self.outer is None:
            return {}
        return {kind: self._shards(flats) for kind, flats in self.outer.state().items()}

    def expert_state(self) -> ExpertState:
        """Return the biases of routers and the last shares of experts, as views, by kind.

        Every rank of a stage holds those of its layers; a dense model has none.
        """
        return expert_state(self.model.balancer, self.groups)

    def position(self) -> dict[str, Any]:
        """Return what, beside tensors and the step, the next step depends on, as JSON."""
        found = {"num_updates": self.num_updates, "loss_scale": self.loss_scale.state()}
        if self.model.scales is not None:
            found[FP8_SCALES] = self.model.scales.state()
        return found

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from `position`, the tensors of this engine having been read from a checkpoint."""
        self.num_updates = int(position["num_updates"])
        self.loss_scale.load(position["loss_scale"])
        if self.model.scales is not None and FP8_SCALES in position:
            self.model.scales.load(position[FP8_SCALES])
        self.optimizer.set_num_steps(self.num_updates)
        self.refresh()

    def refresh(self, *, slices: bool = False) -> None:
        """Take over values that were written from outside: master copies, codes of slices.

        What servers hold goes to their workers, and `slices` to the ranks that gather them.
        """
        masters = self._masters()
        for bucket in self.model.buckets[::-1]:
            if bucket.name in masters:
                bucket.value_slice.copy_(masters[bucket.name])
            if bucket.name in masters or self.is_server or slices:
                self.model.gathering.updated(bucket)
        self.model.gathering.end_update()
        self.model.codes.refresh()

    def finish(self) -> None:
        """Return when all that was sent has come: a run is over."""
        self.model.gathering.settle()
        if self.outer is not None:
            self.outer.settle()

    def close(self) -> None:
        """Give back what rests outside of the device; waits for no other rank."""
        self.optimizer.store.close()
        self.model.close()
        if self._compiling is not None:
            self._compiling.close()

    def _shards(self, flats: Mapping[str, torch.Tensor]) -> dict[str, list[Shard]]:
        held = [bucket for bucket in self.model.buckets if bucket.name in flats]
        if self.is_server:
            tensors = [flats[bucket.name] for bucket in held]
            return server_shards(held, tensors, self.groups, primary=True)
        return bucket_shards(held, [flats[bucket.name] for bucket in held], self.groups)

    def _masters(self) -> Mapping[str, torch.Tensor]:
        """Return the master copies by bucket; a rank without parameters has none."""
        return self.optimizer.state().get(MASTER, {})
