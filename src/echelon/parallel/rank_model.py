"""What a plan becomes on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.models.decoder import Decoder
from echelon.parallel.buckets import Bucket
from echelon.parallel.data import GradientReduction
from echelon.parallel.expert import Balancer
from echelon.parallel.gradients import GradientStore
from echelon.parallel.offload import Rest
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.zero import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """Hold the stages of the model that one rank trains, and what runs and reduces them."""

    stages: Mapping[int, Decoder]
    buckets: list[Bucket]
    store: GradientStore
    reduction: GradientReduction
    residency: Residency
    parameter_rest: Rest | None
    executor: PipelineExecutor
    balancer: Balancer | None
