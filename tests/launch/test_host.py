"""A rank keeps the pages of what it frees: the next tensor of that size faults none in."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import psutil
import torch

from echelon.launch.context import RankContext
from echelon.launch.host import ThreadClock, give_back_freed_memory
from echelon.launch.local.pool import RankPool

MEGABYTES = 8
ROUNDS = 20


def page_faults(_context: RankContext, _argument: object) -> int:
    """Return the page faults of making and freeing a large tensor, once the heap has grown."""
    for _ in range(ROUNDS):
        torch.ones(MEGABYTES * 2**18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        torch.ones(MEGABYTES * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_rank_does_not_fault_its_tensors_in_again(rank_pool: RankPool) -> None:
    (faults,) = rank_pool.run(page_faults)
    pages_of_one = MEGABYTES * 2**20 // resource.getpagesize()
    assert faults < pages_of_one


def resident_bytes(_context: RankContext, _argument: object) -> tuple[int, int]:
    """Return what is resident after a large tensor was freed, and once it was given back."""
    tensors = [torch.ones(MEGABYTES * 2**18) for _ in range(ROUNDS)]
    last = torch.ones(MEGABYTES * 2**18)  # above them: the heap does not end where they were
    del tensors
    before = psutil.Process().memory_info().rss
    give_back_freed_memory()
    after = psutil.Process().memory_info().rss
    return before, after + 0 * last.numel()


def test_a_rank_gives_back_what_it_freed_when_asked(rank_pool: RankPool) -> None:
    ((before, after),) = rank_pool.run(resident_bytes)
    assert before - after > 0.8 * ROUNDS * MEGABYTES * 2**20


def test_what_is_neither_run_nor_queued_for_is_blocked(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("7000000000 2500000000 9\n", encoding="ascii")
    assert ThreadClock.read(schedstat).queued_s == 2.5
    assert ThreadClock.read(tmp_path / "nothing").queued_s == 0.0
    before, after = ThreadClock(1.0, 0.5), ThreadClock(2.0, 0.75)
    assert after.blocked_since(before, 2.0) == 0.75
    assert after.blocked_since(before, 1.0) == 0.0
    here, start = ThreadClock.read(), time.perf_counter()
    time.sleep(0.05)
    wall_s = time.perf_counter() - start
    assert 0 < ThreadClock.read().blocked_since(here, wall_s) <= wall_s
