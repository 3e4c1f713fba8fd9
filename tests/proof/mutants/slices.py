"""Bugs in who holds, updates and gathers which slice, and in what ranks must decide together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.zero import ParameterGathering
from echelon.training.engine import ToldByRank, agree
from echelon.training.optimizer import SliceOptimizer
from tests.proof.layouts import BF16, FP16
from tests.proof.mutants.planting import LAST, Told, change_hops, mutant

AGREE = "echelon.training.engine.agree"

SECOND = "bucket1"
"""The bucket that is treated wrong: the second that backward completes."""


def _only_on_shard(patch: pytest.MonkeyPatch, index: int, change: Any) -> None:
    """Call `change` with the optimizer of the ranks at one place of `dp_shard`."""
    init = SliceOptimizer.__init__

    def changed(
        self: SliceOptimizer, buckets: Any, plan: Plan, *, groups: RankGroups, **rest: Any
    ) -> None:
        init(self, buckets, plan, groups=groups, **rest)
        if groups.shard.index == index:
            change(self)

    patch.setattr(SliceOptimizer, "__init__", changed)


@mutant(
    Told(
        "prove-clipped-update",
        "layers.0.attention_norm.weight",
        "twice",
        "dp_shard",
        plan={"dp": 2, "zero": {"stage": 2}},
    ),
)
def slice_updated_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Update the second rank's slice of a bucket twice in every step."""

    def change(optimizer: SliceOptimizer) -> None:
        once = optimizer._elements

        def twice(bucket: Bucket, rate: float, factor: float, tensors: list[torch.Tensor]) -> None:
            if bucket.name != SECOND:
                return once(bucket, rate, factor, tensors)
            gradient = bucket.gradient_slice.clone()
            once(bucket, rate, factor, tensors)
            bucket.gradient_slice.copy_(gradient)
            return once(bucket, rate, factor, tensors)

        optimizer._elements = twice

    _only_on_shard(patch, 1, change)


@mutant(
    Told(
        "prove-activations",
        f"{LAST}.attention_norm.weight",
        "stale",
        "dp_shard",
        step=1,
        plan={"dp": 2, "zero": {"stage": 3}},
    ),
)
def stale_gathered_parameter(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Gather a bucket from slices that are one update old."""
    gather, end_pass = ParameterGathering._gather, ParameterGathering.end_pass
    kept: dict[str, torch.Tensor] = {}

    def remember(self: ParameterGathering) -> None:
        end_pass(self)
        kept.update({bucket.name: bucket.value_slice.clone() for bucket in self.sliced})

    def old(self: ParameterGathering, bucket: Bucket) -> None:
        fresh = bucket.value_slice
        if bucket.name == SECOND:
            bucket.value_slice = kept.get(bucket.name, fresh)
        gather(self, bucket)
        bucket.value_slice = fresh

    patch.setattr(ParameterGathering, "end_pass", remember)
    patch.setattr(ParameterGathering, "_gather", old)


@mutant(
    Told(
        "prove-loss-scale",
        "loss scale",
        "overflow not agreed",
        "dp_shard",
        step=1,
        plan={"dp": 2, "zero": {"stage": 3}, "precision": FP16},
    ),
)
def overflow_seen_on_one_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each rank look for overflow in the gradients that it holds itself."""

    def alone(told: ToldByRank, groups: RankGroups, device: torch.device) -> torch.Tensor:
        rows = agree(told, groups, device)
        if not rows[:, 1].sum().isfinite():
            rows[:, 1] = 0.0
            rows[0, 1] = told.norm_squared
        return rows

    patch.setattr(AGREE, alone)


@mutant(
    Told(
        "prove-master-weights",
        "layers.0.attention_norm.weight",
        "stale",
        "dp_shard",
        plan={"dp": 2, "zero": {"stage": 1}, "precision": BF16},
        own_precision=True,
    ),
)
def master_not_written_back(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Update the second rank's master copy of a bucket, and leave the parameters as they were."""

    def change(optimizer: SliceOptimizer) -> None:
        target = optimizer._target

        def kept(bucket: Bucket, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            master, values = target(bucket, tensors)
            return master, values.clone() if bucket.name == SECOND else values

        optimizer._target = kept

    _only_on_shard(patch, 1, change)


@mutant(
    Told(
        "prove-gradients",
        "head.weight",
        "missing sum",
        "dp_replicate",
        plan={"dp": 4, "zero": {"stage": 2}, "mesh": {"dp_replicate": 2, "dp_shard": 2}},
    ),
)
def replicas_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave out the sum of slices over the replicas of hybrid sharding."""
    change_hops(patch, lambda kind, hops, groups: [g for g in hops if g is not groups.replicate])


@mutant(
    Told(
        "prove-gradient-norm",
        "gradient norm",
        "partial norm",
        "dp_shard",
        plan={"dp": 2, "zero": {"stage": 1}},
    ),
)
def norm_of_own_slices(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the norm of the first data rank's slices for that of the gradient."""

    def first(told: ToldByRank, groups: RankGroups, device: torch.device) -> torch.Tensor:
        mine = told if groups.shard.index == 0 else replace(told, norm_squared=0.0)
        return agree(mine, groups, device)

    patch.setattr(AGREE, first)
