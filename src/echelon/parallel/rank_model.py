# SPDX-License-Identifier: Apache-2.0
"""What a plan becomes on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from echelon.core.piece_sizes import PieceSizes
from echelon.core.plan import Plan
from echelon.layout.stage import RankPart, held_experts
from echelon.models.decoder import Decoder
from echelon.models.modules import TensorShare
from echelon.parallel.completion.completion import Completion
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.expert import Balancer
from echelon.parallel.fp8_scales import TensorScales
from echelon.parallel.offload import OffloadStore
from echelon.parallel.operations import RankOperations
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.recompute import RecomputingRunner
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.weights import stored_values
from echelon.parallel.zero import ParameterGathering, make_gathering


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """Say where gradients of a rank go and its parameters come from: other data ranks, if not said.

    `reduction` takes a plan and groups, `gathering` the arguments of `make_gathering`.
    """

    reduction: Callable[[Plan, RankGroups], GradientReduction] = GradientReduction
    gathering: Callable[
        [Plan, RankPart, Sequence[Bucket], RankGroups, PieceSizes], ParameterGathering
    ] = make_gathering


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """Hold the stages of the model that one rank trains, and what runs and reduces them."""

    stages: Mapping[int, Decoder]
    """The stages, by number."""
    buckets: list[Bucket]
    """The flat runs of their parameters and gradients."""
    store: GradientStore
    """What takes gradients, microbatch by microbatch."""
    reduction: GradientReduction
    """What sums them over ranks."""
    gathering: ParameterGathering
    """What brings parameters together before they are used."""
    parameter_store: OffloadStore | None
    """Where parameters rest that are not on the device."""
    executor: PipelineExecutor
    """What runs microbatches forward and backward, in the order of a schedule."""

    @property
    def operations(self) -> RankOperations | None:
        """Operations of all stages; None on a rank that computes none."""
        for stage in self.stages.values():
            assert isinstance(stage.operations, RankOperations), "a rank computes as a rank"
            return stage.operations
        return None

    @property
    def balancer(self) -> Balancer | None:
        """Balance of the experts; None in a dense model."""
        operations = self.operations
        experts = None if operations is None else operations.experts
        return None if experts is None else experts.router.balancer

    @property
    def scales(self) -> TensorScales | None:
        """Scales of whole tensors in 8 bits, if there are any."""
        operations = self.operations
        return None if operations is None else operations.split.scales

    @property
    def trained(self) -> list[Bucket]:
        """Return the buckets that have gradients and state: all but frozen ones."""
        return [bucket for bucket in self.buckets if not bucket.plan.frozen]

    def frozen_values(self) -> dict[str, torch.Tensor]:
        """Return the values of the other buckets, as they are kept between uses, by name."""
        frozen = (bucket for bucket in self.buckets if bucket.plan.frozen)
        return {one.name: stored_values(one) for one in frozen}

    def close(self) -> None:
        """Release what rests outside of the device."""
        if self.parameter_store is not None:
            self.parameter_store.close()


def empty_stages(
    plan: Plan, part: RankPart, operations: RankOperations, completion: Completion | None = None
) -> dict[int, Decoder]:
    """Return the stages of a rank on the meta device, each with its policy of recompute."""
    share = TensorShare(
        tp=plan.mesh.tp, expert_tp=plan.layout.experts.expert_tp, experts=held_experts(plan, part)
    )
    stages: dict[int, Decoder] = {}
    for one in part.stages:
        with torch.device("meta"):
            stages[one.stage] = Decoder(
                plan.model,
                operations=operations,
                blocks=one.blocks,
                first=one.first,
                last=one.last,
                share=share,
            )
        stages[one.stage].run_block = RecomputingRunner(
            plan.layout.recompute, operations.recompute, completion
        )
    return stages


def named_parameters(stages: Mapping[int, Decoder]) -> dict[str, nn.Parameter]:
    """Return one parameter of each name: a tied embedding may be in two stages of a rank."""
    return {name: one for stage in stages.values() for name, one in stage.named_parameters()}
