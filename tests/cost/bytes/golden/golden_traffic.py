"""Facts about the traffic and the ranks of ZeRO that tutorials state, by our formulas."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan, Zero, ZeroStage
from echelon.cost.bytes.model_sizes import STAGES, cheapest_stage, communication_volume
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from echelon.cost.bytes.transient import transient_terms
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from tests.cost.bytes.golden.golden_zero import GB, Fact
from tests.cost.layouts import zero_plan


def cluster(name: str) -> Cluster:
    """Return a cluster of the presets."""
    return load_job("nano", (f"cluster.preset={name}",)).plan.cluster


def between_nodes(name: str) -> float:
    """Return how many times slower links between nodes are than inside of one."""
    first, *_, last = cluster(name).links
    return first.bandwidth / last.bandwidth


def names_of_gathers(plan: Plan) -> list[str]:
    """Return the terms of gathered parameters that a plan sends."""
    return [t.name for t in bytes_sent(plan, 0) if t.name.startswith("parameters")]


def whole_gradients_are_few() -> bool:
    """Return whether, at stage 2, whole gradients are at most a few buckets of many."""
    plan = zero_plan(2, dp_shard=2, microbatches=2, bucket_bytes=2048)
    (bound,) = (t for t in transient_terms(plan, 0) if t.name == "whole gradients")
    sizes = [bucket.num_elements for bucket in plan_buckets(plan, rank_part(plan, 0))]
    return bound.bytes <= 3 * max(sizes) * 8 < sum(sizes) * 8


def nodes_of_expert_groups(mesh: Mesh, devices: int) -> int:
    """Return over how many nodes the first expert group spans."""
    return len({rank // devices for rank in mesh.expert_groups()[0]})


def after(stages: tuple[ZeroStage, ...]) -> list[tuple[ZeroStage, ZeroStage]]:
    """Return each stage with the one in front of it; the first with itself."""
    return [*zip((stages[0], *stages), stages, strict=False)]


COMMUNICATION = (
    Fact(
        id="002-38",
        claim="volume in psi: stages 1 and 2 cost nothing more",
        correct=[2, 2, 2, 3],
        ours=lambda: [communication_volume(stage).multiples for stage in STAGES],
    ),
    Fact(
        id="002-39",
        claim="stage 3 sends half as much again, or no more if parameters stay",
        correct=[0.5, 0.0],
        ours=lambda: [
            communication_volume(3, reshard_after_forward=again).multiples
            / communication_volume(0).multiples
            - 1
            for again in (True, False)
        ],
    ),
    Fact(
        id="002-41",
        claim="where stage 3 gathers",
        correct=[["parameters forward", "parameters backward"], ["parameters"]],
        ours=lambda: [
            names_of_gathers(
                zero_plan(3, dp_shard=2, zero=Zero(stage=3, reshard_after_forward=again))
            )
            for again in (True, False)
        ],
    ),
    Fact(
        id="003-07",
        claim="stage 3: two gathers and one reduce-scatter, 3 psi",
        correct=[2, 1, 3],
        ours=lambda: [
            communication_volume(3).all_gathers,
            communication_volume(3).reduce_scatters,
            communication_volume(3).multiples,
        ],
    ),
    Fact(
        id="003-64",
        claim="all-reduce, all-gather, reduce-scatter, all-to-all over 8, of the whole",
        correct=[1.75, 0.875, 0.875, 0.875],
        ours=lambda: [
            all_reduce_bytes(800, 8) / 800,
            all_gather_bytes(100, 8) / 800,
            reduce_scatter_bytes(100, 8) / 800,
            all_to_all_bytes(800, 8) / 800,
        ],
    ),
    Fact(
        id="003-65",
        claim="an all-to-all sends half of what an all-reduce sends",
        correct=[0.875, 1.75],
        ours=lambda: [all_to_all_bytes(800, 8) / 800, all_reduce_bytes(800, 8) / 800],
    ),
    Fact(
        id="003-71",
        claim="start with the least that fits: 1B, 7B, 20B, 70B on 80 GB at N = 8, 8, 8, 64",
        correct=[0, 1, 2, 3],
        ours=lambda: [
            cheapest_stage(psi * GB, 80 * GB, degree)
            for psi, degree in ((1, 8), (7, 8), (20, 8), (70, 64))
        ],
    ),
    Fact(
        id="X-02",
        claim="no stage before one that sends less and fits",
        correct=[True] * 4,
        ours=lambda: [
            communication_volume(a).multiples <= communication_volume(b).multiples
            for a, b in after(STAGES)
        ],
    ),
    Fact(
        id="004-17",
        claim="gradients are scattered bucket by bucket during backward",
        correct=True,
        ours=whole_gradients_are_few,
    ),
)

GRIDS = (
    Fact(
        id="002-43",
        claim="bf16 over fp32 of an A100",
        correct=16.0,
        ours=lambda: (
            (cluster("8xa100-80gb").device.flops("bf16") or 0)
            / (cluster("8xa100-80gb").device.flops("fp32") or 1)
        ),
    ),
    Fact(
        id="002-45",
        claim="tp 8 x pp 8 x dp 16",
        correct=1024,
        ours=lambda: Mesh(tp=8, pp=8, dp_replicate=16).world_size,
    ),
    Fact(
        id="002-48",
        claim="NVLink over InfiniBand, one way: A100, H100",
        correct=[12.0, 9.0],
        ours=lambda: [between_nodes("16xa100-80gb"), between_nodes("16xh100")],
    ),
    Fact(
        id="002-49",
        claim="the world is dp x tp x pp x cp; ep uses the same ranks",
        correct=[64, 128],
        ours=lambda: [
            Mesh(dp_shard=2, tp=8, pp=4, ep=2).world_size,
            Mesh(dp_shard=2, tp=8, pp=4, cp=2, ep=4).world_size,
        ],
    ),
    Fact(
        id="003-69",
        claim="DeepSeek-V3: pp 16, 128 data ranks a stage, experts over 64 ranks on 8 nodes",
        correct=[2048, 8],
        ours=lambda: [
            Mesh(pp=16, dp_shard=128, ep=64).world_size,
            nodes_of_expert_groups(Mesh(pp=16, dp_shard=128, ep=64), 8),
        ],
    ),
)
