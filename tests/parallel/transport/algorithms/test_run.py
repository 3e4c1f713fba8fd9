"""All-reduces by messages on ranks: the sum, the bytes, several under way, and what goes wrong."""

from __future__ import annotations

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.algorithms import BackgroundThread
from tests.parallel.transport.algorithms import targets
from tests.parallel.transport.algorithms.targets import Moved, Summed

Ranks = list[dict[str, Summed]]


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Ranks:
    """Sum by every algorithm on two, three and four ranks."""
    return rank_pool.run(targets.sum_each, None, world_size=request.param)


@pytest.mark.system("S09")
def test_every_algorithm_sums_as_the_backend_does(ranks: Ranks) -> None:
    for case in ranks[0]:
        every = [rank[case] for rank in ranks]
        total = torch.stack([one.given for one in every]).sum(0)
        for one in every:
            assert torch.equal(one.got, total), case
            assert one.two, case


def test_the_bytes_of_each_member_are_recorded(ranks: Ranks) -> None:
    for rank, cases in enumerate(ranks):
        for one in cases.values():
            assert one.event.kind == "all_reduce"
            assert one.event.rank == rank
            assert one.event.bytes == one.told


@pytest.mark.parametrize("size", [3, 4])
def test_slices_of_sums_and_gathered_slices_are_those_of_the_backend(
    size: int, rank_pool: RankPool
) -> None:
    every: list[dict[str, Moved]] = rank_pool.run(targets.move_each, None, world_size=size)
    for case in every[0]:
        ranks = [rank[case] for rank in every]
        total = torch.stack([one.given for one in ranks]).sum(0)
        slices = total.chunk(size) if total.numel() else [total] * size
        first = torch.cat([one.given[: len(one.slice)] for one in ranks])
        for place, one in enumerate(ranks):
            assert torch.equal(one.slice, slices[place]), case
            assert torch.equal(one.in_place, slices[place]), case
            assert torch.equal(one.kept, one.given), f"{case}: what is scattered stays"
            assert torch.equal(one.gathered, first), case
            assert torch.equal(one.behind, total), case
            sent = [(event.name, event.bytes) for event in one.events]
            names = ("gather", "in place", "scatter", "behind")
            assert sent == [(name, one.told) for name in names], case


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_lands_beside_a_sum_is_that_of_the_formula(size: int, rank_pool: RankPool) -> None:
    # Two sums are given at once: the thread of a group runs one after the other.
    found = rank_pool.run(f"{targets.__name__}:landings", 37, size)
    for rank in found:
        assert all(most == told for most, told in rank.values()), rank
    assert any(most for rank in found for most, _ in rank.values())


def test_a_thread_runs_tasks_in_order_and_gives_errors_to_who_waits() -> None:
    seen: list[int] = []

    def fail() -> None:
        raise RuntimeError("a peer has gone")

    thread = BackgroundThread()
    works = [thread.start(lambda number=number: seen.append(number)) for number in range(3)]
    failing, last = thread.start(fail), thread.start(lambda: seen.append(3))
    last.wait()
    assert seen == [0, 1, 2, 3]
    assert all(work.is_completed() for work in (*works, failing))
    with pytest.raises(RuntimeError, match="a peer has gone"):
        failing.wait()
