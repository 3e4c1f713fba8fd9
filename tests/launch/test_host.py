"""A rank keeps the pages of what it frees: the next tensor of that size faults none in."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

from echelon.launch.context import RankContext
from echelon.launch.host import ThreadClock
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
