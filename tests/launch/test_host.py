"""A rank keeps the pages of what it frees: the next tensor of that size faults none in."""

from __future__ import annotations

import resource

import torch

from echelon.launch.context import RankContext
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
