"""Asynchronous calls of a program that calls torch.distributed itself show results in `wait`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from echelon.parallel.completion.in_flight import RaceKind
from echelon.parallel.completion.late_program import LateProgram, LateWork


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_result_is_there_after_wait_and_not_before() -> None:
    late, x = LateProgram(0, 1), torch.ones(3)
    late.name_of = lambda _: "x"
    plain = dist.all_reduce
    with late.patched(), late.watching():
        work = dist.all_reduce(x, async_op=True)
        assert isinstance(work, LateWork)
        with late.quiet():
            assert bool(x.isnan().all())
        with late.quiet(results=True):
            assert x.tolist() == [1.0, 1.0, 1.0]
        with late.quiet():
            assert bool(x.isnan().all())
        assert work.wait()
        assert x.tolist() == [1.0, 1.0, 1.0]
    assert (late.races, late.num_operations) == ([], 1)
    assert dist.all_reduce is plain


def test_a_buffer_that_is_used_too_early_is_a_race() -> None:
    late, whole, part = LateProgram(0, 1), torch.zeros(2), torch.ones(2)
    late.name_of = lambda tensor: f"buffer of {tensor.numel()}"
    with late.patched(), late.watching():
        work: Any = dist.all_gather_into_tensor(whole, part, async_op=True)
        part.add_(1)
        (whole * 2).sum()
        work.wait()
    kinds = {(race.kind, race.operation) for race in late.races}
    name = "all_gather_into_tensor buffer of 2"
    assert kinds == {(RaceKind.CHANGED, name), (RaceKind.USED, name)}
    assert all("test_late_program.py" in race.at for race in late.races)


def test_what_is_synchronous_or_not_contiguous_is_not_delayed() -> None:
    late, x = LateProgram(0, 1), torch.ones(2, 2)
    with late.patched(), late.watching():
        dist.all_reduce(x)
        work = dist.broadcast(x.t(), 0, async_op=True)
        assert not isinstance(work, LateWork)
        done: Any = dist.all_reduce(x, async_op=True)
        done.get_future().wait()
        assert x.sum() == 4
        other: Any = dist.all_reduce(x, async_op=True)
        while not other.is_completed():
            pass
    assert late.races == []
    assert late.num_operations >= 2
