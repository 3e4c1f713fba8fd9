"""Bugs in how gradients are summed, scaled and accumulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.parallel import data
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.tensor import RowLinear
from echelon.parallel.transport.collectives import Group, Pending
from echelon.training.engine import ToldByRank, TrainEngine, agree
from echelon.training.optimizer import local_norm_squared
from echelon.training.steps.part import StepResult
from tests.proof.mutants.context_layouts import split
from tests.proof.mutants.planting import LAST, Told, change_hops, change_routes, mutant

AGREE = "echelon.training.engine.agree"


def scale_microbatches(patch: pytest.MonkeyPatch, factor: Any) -> None:
    """Multiply the loss of each microbatch before backward; what is reported stays right."""
    forward, run = PipelineExecutor._forward, PipelineExecutor.run

    def scaled(
        self: Any, state: Any, action: Any, x: Any, batch: TokenBatch, scale: float
    ) -> torch.Tensor | None:
        times = factor(action.microbatch, batch, scale)
        return forward(self, state, action, x, batch, scale * times)

    def divided(
        self: Any, schedule: Any, batches: Sequence[TokenBatch], scale: float
    ) -> dict[int, torch.Tensor]:
        losses = run(self, schedule, batches, scale)
        return {m: loss / factor(m, batches[m], scale) for m, loss in losses.items()}

    patch.setattr(PipelineExecutor, "_forward", scaled)
    patch.setattr(PipelineExecutor, "run", divided)


@mutant(
    Told("prove-gradients", "head.weight", "mean of means", "dp or microbatches", plan={"dp": 2}),
)
def mean_of_means(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide each microbatch by its own tokens, then by the number of microbatches."""
    parts = plan.mesh.dp * plan.num_microbatches
    scale_microbatches(patch, lambda m, batch, scale: 1 / (parts * batch.num_valid() * scale))


@mutant(
    Told("prove-gradients", "head.weight", "tokens", "microbatches", plan={"dp": 2}),
)
def last_microbatch_unscaled(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide by the number of tokens in all microbatches but the last."""
    last = plan.num_microbatches - 1
    scale_microbatches(patch, lambda m, batch, scale: 1 / scale if m == last else 1.0)


@mutant(
    Told("prove-gradients", "head.weight", "sign"),
)
def turned_sign(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Climb instead of descending."""
    scale_microbatches(patch, lambda m, batch, scale: -1.0)


@mutant(
    Told("prove-loss", "loss", "mean of means", "dp", plan={"dp": 2}),
)
def loss_is_mean_of_means(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Report the mean over replicas of their own mean loss; gradients are right."""
    step, shares = TrainEngine.step, list[float]()

    def remember(self: Any, batches: Sequence[TokenBatch], number: int) -> Any:
        shares[:] = [sum(b.num_valid() for b in batches) / self.count_tokens(batches)]
        return step(self, batches, number)

    def mean(told: ToldByRank, groups: RankGroups, device: torch.device) -> torch.Tensor:
        return agree(replace(told, loss=told.loss / shares[0] / plan.mesh.dp), groups, device)

    patch.setattr(TrainEngine, "step", remember)
    patch.setattr(AGREE, mean)


@mutant(
    Told("prove-token-count", "token count", "token ratio of dp 0", "dp", plan={"dp": 2}),
    Told("prove-token-count", "token count", "token ratio of cp 0", "cp", plan=split("ring")),
)
def local_token_count(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take this rank's tokens for those of the global batch."""

    def count(self: TrainEngine, batches: Sequence[TokenBatch]) -> int:
        return sum(batch.num_valid() for batch in batches)

    patch.setattr(TrainEngine, "count_tokens", count)


@mutant(
    Told("prove-gradients", "layers.0.mlp.down.weight", "missing sum", "dp", plan={"dp": 2}),
)
def missing_all_reduce(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the second bucket unreduced."""
    first_hop = GradientReduction._start_first_sum

    def skip(self: GradientReduction, bucket: Bucket, hops: list[Group]) -> data._PendingSum:
        if bucket.name != "bucket1":
            return first_hop(self, bucket, hops)
        return data._PendingSum(
            bucket, Pending(), bucket.gradients, bucket.gradients, hops, add=False
        )

    patch.setattr(GradientReduction, "_start_first_sum", skip)


@mutant(
    Told("prove-gradients", "head.weight", "dp", "dp", plan={"dp": 4}),
    Told("prove-gradients", "head.weight", "dp", "dp", plan={"dp": 2, "tp": 2}),
)
def doubled_all_reduce(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Reduce every bucket twice."""
    first_hop = GradientReduction._start_first_sum

    def twice(self: GradientReduction, bucket: Bucket, hops: list[Group]) -> data._PendingSum:
        first_hop(self, bucket, hops).pending.wait()
        return first_hop(self, bucket, hops)

    patch.setattr(GradientReduction, "_start_first_sum", twice)


@mutant(
    Told("prove-gradients", "head.weight", "1/dp", "dp", plan={"dp": 4}),
)
def averaged_all_reduce(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Average over data ranks what is divided by the tokens of all of them already."""
    first_hop = GradientReduction._start_first_sum

    def average(self: GradientReduction, bucket: Bucket, hops: list[Group]) -> data._PendingSum:
        bucket.gradients.div_(self._groups[bucket.plan.expert].data.size)
        return first_hop(self, bucket, hops)

    patch.setattr(GradientReduction, "_start_first_sum", average)


@mutant(
    Told("prove-gradients", "head.weight", "wrong group", "tp", plan={"dp": 2, "tp": 2}),
)
def wrong_group(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum gradients over the tensor ranks instead of the data ranks."""
    change_routes(patch, lambda route, groups: replace(route, data=groups.tensor))


def _drop_sums_over(patch: pytest.MonkeyPatch, axis: str) -> None:
    change_hops(patch, lambda kind, hops, groups: [one for one in hops if one.axis != axis])


@mutant(
    Told("prove-gradients", "embedding.weight", "missing sum", "pp", plan={"pp": 2, "tied": True}),
)
def tied_gradient_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave each end of the pipeline its own part of the tied embedding's gradient."""
    _drop_sums_over(patch, "pp")


@mutant(
    Told(
        "prove-gradients",
        "norm.weight",
        "missing sum",
        "tp",
        plan={"tp": 2, "sequence_parallel": True},
    ),
)
def norm_gradient_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Forget that under sequence parallelism a norm sees the tokens of its rank only."""
    _drop_sums_over(patch, "tp")


@mutant(
    Told("prove-gradients", f"{LAST}.mlp_norm.weight", "missing sum", "tp", plan={"tp": 2}),
)
def column_backward_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave out the backward all-reduce of every column-parallel layer."""
    reduce = Group.all_reduce

    def skip(self: Group, tensor: torch.Tensor, *, name: str, **options: Any) -> Pending:
        return (
            Pending(None)
            if name == "column.backward"
            else reduce(self, tensor, name=name, **options)
        )

    patch.setattr(Group, "all_reduce", skip)


@mutant(
    Told("prove-activations", "layers.0.attention.o.weight", "tp", "tp", plan={"tp": 4}),
    Told("prove-activations", "layers.0.attention.o.weight", "tp", "tp", plan={"dp": 2, "tp": 2}),
)
def row_forward_doubled(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum the output of every row-parallel layer twice."""
    reduce = Group.all_reduce

    def twice(self: Group, tensor: torch.Tensor, *, name: str, **options: Any) -> Pending:
        if name == "row.forward":
            reduce(self, tensor, name=name)
        return reduce(self, tensor, name=name, **options)

    patch.setattr(Group, "all_reduce", twice)


@mutant(
    Told(
        "prove-activations",
        "layers.0.attention.o.bias",
        "tp",
        "tp",
        plan={"tp": 4, "model": {"output_bias": True, "mlp_bias": True}},
    ),
    Told(
        "prove-activations",
        "layers.0.attention.o.bias",
        "tp",
        "tp",
        plan={"dp": 2, "tp": 2, "model": {"output_bias": True, "mlp_bias": True}},
    ),
)
def bias_per_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add the bias of a row-parallel layer before the sum over the ranks, so tp times."""

    def forward(
        ctx: Any, x: torch.Tensor, linear: Any, split: Any, again: bool = False
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.linear, ctx.split, ctx.learns = linear, split, True
        y = x @ linear.weight.t() + linear.bias
        split.group.all_reduce(y, name="row.forward").wait()
        return y

    patch.setattr(RowLinear, "forward", staticmethod(forward))


@mutant(
    Told("prove-gradients", "head.weight", "microbatches lost", "microbatches", plan={"dp": 2}),
)
def dropped_accumulation(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let every microbatch overwrite the gradients of the one before."""
    start = GradientStore.start_backward

    def afresh(self: GradientStore, stage: int = 0, *, last: bool) -> None:
        self.start_step()
        start(self, stage, last=last)

    patch.setattr(GradientStore, "start_backward", afresh)


@mutant(
    Told("prove-gradients", "head.weight", "stale", step=1),
)
def stale_gradients(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Never clear the buckets: each step adds to the gradients of the one before."""
    start, steps = GradientStore.start_step, [0]

    def once(self: GradientStore) -> None:
        steps[0] += 1
        if steps[0] == 1:
            start(self)

    patch.setattr(GradientStore, "start_step", once)


@mutant(
    Told("prove-gradient-norm", "gradient norm", "partial norm", "pp", plan={"pp": 2}),
)
def stage_norm(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the norm of the last pipeline stage for that of the model."""

    def own(told: ToldByRank, groups: RankGroups, device: torch.device) -> torch.Tensor:
        last = groups.pipe_forward.index == groups.pipe_forward.size - 1
        return agree(told if last else replace(told, norm_squared=0.0), groups, device)

    patch.setattr(AGREE, own)


@mutant(
    Told("prove-clipped-update", "embedding.weight", "partial norm", "pp", plan={"pp": 2}),
)
def clip_by_local_norm(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Clip by the norm of what this rank holds; the reported norm is right."""
    update = TrainEngine._update

    def local(self: TrainEngine, report: StepResult, step: int) -> None:
        norm = local_norm_squared(self.model.buckets) ** 0.5
        update(self, replace(report, grad_norm=norm), step)

    patch.setattr(TrainEngine, "_update", local)
