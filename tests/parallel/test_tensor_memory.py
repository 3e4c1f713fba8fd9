"""Memory that comes and goes: views follow it, and a stock is enough for buckets in turn."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.tensor_memory import BufferPool, OwnedTensorMemory, PooledTensorMemory
from tests.parallel import targets
from tests.parallel.layouts import QWEN, plan_of
from tests.parallel.offload import buffer_pool_targets

CPU = torch.device("cpu")


def test_own_memory_goes_and_the_views_are_right_again() -> None:
    flat = torch.arange(6.0)
    view = flat[2:].view(2, 2)
    memory = OwnedTensorMemory(flat)
    memory.release()
    memory.release()
    assert not memory.present
    assert flat.untyped_storage().size() == 0
    assert view.shape == (2, 2)
    memory.allocate()
    flat.copy_(torch.arange(6.0))
    memory.allocate()
    assert memory.present
    assert view.tolist() == [[2, 3], [4, 5]]


def test_lent_memory_is_what_the_last_one_used() -> None:
    stock = BufferPool(CPU)
    first, second = (PooledTensorMemory(6, torch.float64, stock) for _ in range(2))
    views = [torch.nn.Parameter(memory.flat[2:].view(2, 2)) for memory in (first, second)]
    for memory, view in zip((first, second), views, strict=True):
        memory.add_view(view)
    assert stock.num_buffers == 2
    first.release()
    second.release()
    places: set[int] = set()
    for memory, view in ((second, views[1]), (first, views[0])):
        memory.allocate()
        memory.allocate()
        memory.flat.copy_(torch.arange(6.0))
        assert memory.present
        assert view.tolist() == [[2, 3], [4, 5]]
        places.add(memory.flat.data_ptr())
        memory.release()
        memory.release()
    assert stock.num_buffers == 2
    assert len(places) == 1


@pytest.mark.parametrize(("wanted", "pieces"), [(100, 1), (50, 1), (49, 2), (101, 2)])
def test_a_piece_serves_what_is_near_its_size(wanted: int, pieces: int) -> None:
    stock = BufferPool(CPU)
    stock.give_back(stock.take(100))
    assert stock.take(wanted).numel() >= wanted
    assert stock.num_buffers == pieces


@pytest.mark.parametrize("pp", [1, 2])
def test_no_step_needs_more_pieces_than_the_first_and_freed_values_are_not_read(
    rank_pool: RankPool, pp: int
) -> None:
    zero = Zero(stage=3, accumulate="slices")
    plan = plan_of(dp_shard=2, pp=pp, zero=zero, model=QWEN, microbatches=2)
    ranks = rank_pool.run(buffer_pool_targets.spoil_freed, plan, world_size=2 * pp)
    counts, losses = zip(*ranks, strict=True)
    assert all(len(set(steps)) == 1 for steps in counts)
    whole = rank_pool.run(targets.train, (plan_of(dp=2, model=QWEN), 3), world_size=2)
    for spoiled in losses:
        assert spoiled == pytest.approx(whole[0].losses, rel=1e-12)
