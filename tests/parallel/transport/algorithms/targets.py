"""What ranks run in the tests of algorithms that sum, and how steps run without ranks."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from dataclasses import dataclass

import pytest
import torch

from echelon.core.event import Event
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.launch.context import RankContext
from echelon.parallel.transport.algorithms import Step, steps_of
from echelon.parallel.transport.collectives import Pending
from tests.parallel.targets import tensor_group

OWN = ("ring", "tree", "halving-doubling", "hierarchical")
SIZES = (0, 1, 3, 12, 37)
"""Elements, some fewer than ranks and some that no group divides."""


def groups_of(size: int) -> list[tuple[str, int]]:
    """Return the algorithms that a group of `size` can have, with members per node."""
    found = [("ring", size), ("tree", size)]
    if size & (size - 1) == 0:
        found.append(("halving-doubling", size))
    nodes = [each for each in range(2, size) if size % each == 0]
    return [*found, *(("hierarchical", each) for each in nodes)]


def sums_of(algorithm: str, place: int, size: int, each: int) -> SumGroup:
    """Return a member of a group of `size`, `each` of them on every node."""
    nodes = tuple(one // each for one in range(size))
    return SumGroup(algorithm=algorithm, place=place, nodes=nodes)


def summed_here(parts: list[list[int]], plans: list[tuple[Step, ...]]) -> list[list[int]]:
    """Run the steps of all members in one process, as far as each can go; raise where none can."""
    values = [list(part) for part in parts]
    queues: dict[tuple[int, int], deque[list[int]]] = {}
    at, posted = [0] * len(plans), [False] * len(plans)
    while any(at[one] < len(plans[one]) for one in range(len(plans))):
        moved = False
        for one, steps in enumerate(plans):
            if at[one] == len(steps):
                continue
            step = steps[at[one]]
            if not posted[one]:
                for other, part in step.sends:
                    queue = queues.setdefault((one, other), deque())
                    queue.append(values[one][part.start : part.stop])
                posted[one] = moved = True
            if all(queues.get((other, one)) for other, _ in step.receives):
                for other, part in step.receives:
                    come = queues[other, one].popleft()
                    old = values[one][part.start : part.stop] if step.adds else [0] * len(come)
                    assert len(come) == part.length
                    values[one][part.start : part.stop] = [
                        x + y for x, y in zip(old, come, strict=True)
                    ]
                at[one], posted[one], moved = at[one] + 1, False, True
        assert moved, "each member waits for what no other sends"
    assert not any(queues.values()), "what was sent was received"
    return values


def tiers_sent(steps: tuple[Step, ...], member: SumGroup) -> tuple[int, int]:
    """Return how many elements a member sends inside of its node, and to other nodes."""
    tiers = [0, 0]
    for step in steps:
        for other, part in step.sends:
            tiers[member.nodes[other] != member.nodes[member.place]] += part.length
    return tiers[0], tiers[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What one rank gave, got, and recorded, and what was there before it waited."""

    given: torch.Tensor
    got: torch.Tensor
    event: Event
    told: int
    two: bool


def sum_each(context: RankContext, _: None) -> dict[str, Summed]:
    """Sum tensors of odd sizes by every algorithm, two of them under way at once."""
    group, events = tensor_group(context)
    found: dict[str, Summed] = {}
    for algorithm, each in groups_of(group.size):
        sums = sums_of(algorithm, group.index, group.size, each)
        group.sum_by(sums)
        for dtype in (torch.float64, torch.bfloat16):
            for count in SIZES:
                generator = torch.Generator().manual_seed(group.index)
                given = torch.randint(-8, 8, (count,), generator=generator).to(dtype)
                got, other = given.clone(), 2 * given
                events.events.clear()
                pending = group.all_reduce(got, name="sum", async_op=True)
                behind = group.all_reduce(other, name="behind", async_op=True)
                behind.wait()
                pending.wait()
                event = next(one for one in events.events if one.name == "sum")
                found[f"{algorithm} {each} {dtype} {count}"] = Summed(
                    given=given,
                    got=got,
                    event=event,
                    told=sums.bytes(count, given.element_size()),
                    two=torch.equal(other, 2 * got) and pending.done(),
                )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one rank gave to be scattered, its slice, what it gathered, and what was recorded."""

    given: torch.Tensor
    kept: torch.Tensor
    slice: torch.Tensor
    in_place: torch.Tensor
    gathered: torch.Tensor
    behind: torch.Tensor
    events: list[Event]
    told: int


def move_each(context: RankContext, _: None) -> dict[str, Moved]:
    """Scatter sums and gather slices by every algorithm, several of them under way at once."""
    group, events = tensor_group(context)
    found: dict[str, Moved] = {}
    for algorithm, each in groups_of(group.size):
        sums = sums_of(algorithm, group.index, group.size, each)
        group.sum_by(sums)
        for dtype in (torch.float64, torch.bfloat16):
            for length in (0, 1, 5):
                generator = torch.Generator().manual_seed(group.index)
                shape = (length * group.size, 3)
                given = torch.randint(-8, 8, shape, generator=generator).to(dtype)
                kept, piece = given.clone(), given.new_empty((length, 3))
                place = given.clone()
                gathered, behind = torch.empty_like(given), torch.empty_like(given)
                own = place[group.index * length : (group.index + 1) * length]
                events.events.clear()
                pending = [
                    group.reduce_scatter(piece, kept, name="scatter", async_op=True),
                    group.reduce_scatter(own, place, name="in place", async_op=True),
                    group.all_gather(gathered, given[:length], name="gather", async_op=True),
                ]
                for one in reversed(pending):
                    one.wait()
                behind.copy_(place)
                mine = behind[group.index * length : (group.index + 1) * length]
                group.all_gather(behind, mine, name="behind")
                found[f"{algorithm} {each} {dtype} {length}"] = Moved(
                    given=given,
                    kept=kept,
                    slice=piece,
                    in_place=own.clone(),
                    gathered=gathered,
                    behind=behind,
                    events=list(events.events),
                    told=sum(sums.slice_bytes_by_tier(piece.nbytes)),
                )
    return found


def landings(context: RankContext, count: int) -> dict[str, tuple[int, int]]:
    """Return the most bytes that land beside a sum by each algorithm at a time, and the formula.

    Of all-reduces of `count` numbers, and of reduce-scatters into slices of as many.
    """
    group, _ = tensor_group(context)
    found: dict[str, tuple[int, int]] = {}
    made = torch.empty_like
    living: Counter[str] = Counter()

    def empty_like(like: torch.Tensor) -> torch.Tensor:
        tensor, size = made(like), like.numel() * like.element_size()
        living["now"] += size
        living["most"] = max(living["most"], living["now"])
        weakref.finalize(tensor, lambda: living.subtract({"now": size}))
        return tensor

    def most(pending: list[Pending]) -> int:
        for one in pending:
            one.wait()
        return living["most"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
        for algorithm, each in groups_of(group.size):
            sums = sums_of(algorithm, group.index, group.size, each)
            group.sum_by(sums)
            living.clear()
            reduced = [
                group.all_reduce(torch.ones(count), name=name, async_op=True) for name in ("a", "b")
            ]
            told = sums.arriving_elements(count) * 4
            found[f"{algorithm} {each}"] = (most(reduced), told)
            if not sums.scatters:
                continue
            living.clear()
            whole, piece = torch.ones(count * group.size), torch.ones(count)
            scattered = [
                group.reduce_scatter(piece.clone(), whole, name=name, async_op=True)
                for name in ("a", "b")
            ]
            told = sums.slices_beside() * count * 4
            found[f"{algorithm} {each}, scattered"] = (most(scattered), told)
            group.all_gather(whole, piece, name="gather")
            assert living["most"] == told, "what is gathered lands in its place"
    return found


def num_steps(algorithm: str, size: int, each: int) -> int:
    """Return how many steps the busiest member of a group has for a long tensor."""
    made = (steps_of(sums_of(algorithm, one, size, each), 64 * size) for one in range(size))
    return max(map(len, made))
