"""Tensor ranks compute what one device does, and send what the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Optimizer, Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel.layouts import plan_of
from tests.parallel.module.sent_bytes import module_bytes, module_tensor_bytes
from tests.parallel.module.tensor import targets
from tests.parallel.module.tensor.families import FAMILIES, LENGTH
from tests.parallel.module.tensor.targets import Loop, Looped

OPTIMIZER = Optimizer(total_steps=8, clip_norm=0.5, eps=1e-3, warmup_steps=1, learning_rate=1e-2)

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sequence": {"tp": 2, "sequence_parallel": True},
    "tp2 zero3": {"tp": 2, "dp_shard": 2, "zero": Zero(stage=3)},
    "tp2 sequence zero3": {
        "tp": 2,
        "dp_shard": 2,
        "sequence_parallel": True,
        "zero": Zero(stage=3, accumulate="slices"),
    },
}


def loop_of(model: str, layout: str, **changes: Any) -> Loop:
    """Return a loop over a model under a layout by name."""
    plan = plan_of(optimizer=OPTIMIZER, bucket_bytes=4000, **LAYOUTS[layout])
    return Loop(plan=plan, model=model, **changes)


def assert_as_on_one_device(pool: RankPool, loop: Loop) -> list[Looped]:
    """Compare losses, norms, parameters and moments of all ranks with one device; return them."""
    mesh = loop.plan.mesh
    ranks = pool.run(targets.train, loop, world_size=mesh.world_size, timeout_s=200.0)
    losses, norms, after, moments = targets.one_device(loop, mesh.dp)
    for rank in ranks:
        assert rank.losses == pytest.approx(losses[rank.data_rank], rel=1e-11)
        assert rank.norms == pytest.approx(norms, rel=1e-10)
    for mine, right in ((ranks[0].after, after), (ranks[0].moments, moments)):
        assert set(mine) == set(right)
        for name, value in right.items():
            scale = float(value.norm()) + 1e-3
            assert float((mine[name] - value).norm()) / scale < 1e-10, name
    return ranks


@pytest.mark.parametrize("layout", ["tp2 sequence zero3"])
def test_a_module_of_ones_own(rank_pool: RankPool, layout: str) -> None:
    assert_as_on_one_device(rank_pool, loop_of("own", layout))


def assert_bytes(loop: Loop, ranks: list[Looped]) -> None:
    """Compare what each rank sent over tensor ranks in the second step with the formulas."""
    split, plan = ranks[0].split, loop.plan
    for rank in ranks:
        each = module_tensor_bytes(split, 2 * LENGTH, 8)
        reduced = module_bytes(plan, rank.buckets, passes=loop.microbatches, kept=())
        assert rank.tensor_bytes[1] == loop.microbatches * each + reduced.get("tp", 0)


@pytest.mark.parametrize(
    "layout", ["tp2", pytest.param("tp2 sequence zero3", marks=pytest.mark.slow)]
)
def test_what_is_sent(rank_pool: RankPool, layout: str) -> None:
    loop = loop_of("own", layout, microbatches=2)
    assert_bytes(loop, assert_as_on_one_device(rank_pool, loop))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2 sequence"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "olmo2", "gpt2"])
def test_what_families_send(rank_pool: RankPool, model: str, layout: str) -> None:
    loop = loop_of(model, layout)
    assert_bytes(loop, assert_as_on_one_device(rank_pool, loop))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [*FAMILIES, "own"])
def test_families(rank_pool: RankPool, model: str, layout: str) -> None:
    assert_as_on_one_device(rank_pool, loop_of(model, layout))


def test_motions_along_any_dim_give_tensors_that_need_no_further_copy(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(targets.move_each, (0, 1, -2, -1), world_size=2)

    def joined(parts: list[torch.Tensor], dim: int, index: int) -> torch.Tensor:
        return torch.cat(parts, dim)

    def scattered(parts: list[torch.Tensor], dim: int, index: int) -> torch.Tensor:
        return sum(parts[1:], parts[0]).chunk(2, dim)[index]

    def own(parts: list[torch.Tensor], dim: int, index: int) -> torch.Tensor:
        return parts[index].chunk(2, dim)[index]

    ways = {
        "gather": (joined, scattered),
        "scatter": (scattered, joined),
        "own": (own, joined),
        "whole": (joined, own),
    }
    for name, dim in ranks[0]:
        every = [rank[name, dim] for rank in ranks]
        forward, backward = ways[name]
        for index, one in enumerate(every):
            assert torch.equal(one.y, forward([other.x for other in every], dim, index))
            assert torch.equal(one.dx, backward([other.dy for other in every], dim, index))
            assert one.contiguous or name == "own", (name, dim)
