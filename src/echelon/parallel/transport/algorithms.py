# SPDX-License-Identifier: Apache-2.0
"""Collectives from messages: each algorithm makes the steps of one member, and one loop runs them.

Steps are plain numbers, so their bytes and their sums can be checked without a process. Over Gloo a
message goes on without its host, a step that adds does not. So each communicator has one thread,
which runs its collectives in the order in which they were issued: as the backend runs its own, and
the same on every member.

Ring: two phases, each of n-1 steps to the next member, or one of them alone.

Split:       the tensor, into n chunks; their sizes differ by one element at most.
Sent:        phase 1, reduce-scatter: in step s member i sends chunk i-s, and adds chunk i-s-1 that
             comes. After it member i owns the sum of chunk i+1. Phase 2, all-gather: it sends chunk
             i+1-s, and keeps chunk i-s that comes. Alone, either phase has its chunks one place
             on: member i owns slice i, as slices lie everywhere else.
Bytes:       2 (n-1)/n M; of odd sizes 2 M less two chunks; n-1 slices of one phase:
             `cost/bytes/all_reduce.py`.
Must divide: nothing.
Source:      Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
             workstations, 2009.

Tree: sums go up a binomial tree to place 0, and the total comes down again. No reduce-scatter.

Split:       nothing: each message is the whole tensor.
Sent:        place i gets from i + 1, i + 2, i + 4, ... below its own lowest set bit, adds, and
             sends the sum to i less that bit; then the same way back.
Bytes:       M up (place 0: none), and M down to each child. Few steps, many bytes: for small
             tensors.
Must divide: nothing.
Source:      Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005
             (binomial tree).

Halving and doubling: pairs exchange halves of what is left, and go the way back.

Split:       the tensor, into n chunks, of which a pair that is d places apart halves 2 d.
Sent:        d = n/2, ..., 2, 1: the half that the other keeps, which it adds; after this place i
             owns the sum of chunk i. d = 1, 2, ..., n/2: what this one has, which the other keeps.
Bytes:       2 (n-1)/n M in 2 log2 n steps; n-1 slices one way.
Must divide: n is a power of two (rule `halving-needs-power-of-two`).
Source:      Rabenseifner, Optimization of Collective Reduction Operations, 2004; Thakur et al.,
             2005.

Hierarchical: sums inside of nodes, then across them, and back: few bytes on the slow links.

Split:       an all-reduce: the tensor, into l parts among the l members of a node; each part into k
             chunks among the k nodes. A reduce-scatter or an all-gather: n slices, of which member
             j of node a has slice a l + j, as everywhere else.
Sent:        all-reduce: reduce-scatter inside of a node, each part straight to its owner; a ring
             all-reduce of each part among those who own it, one on each node, all l rings at once;
             all-gather inside of the node, straight to all.
             Reduce-scatter: inside of a node member j is sent the k slices of the members j of all
             nodes, and adds them; around the ring of these members each slice comes to its node.
             All-gather: a slice goes around the ring of the members j first; then each sends the k
             slices that it has to all of its node.
Bytes:       all-reduce: 2 (l-1)/l M inside of nodes and 2 (k-1)/k M/l across them, together the
             2 (n-1)/n M of a ring. A node sends 2 (k-1)/k M to others, where a ring of all sends
             2 (n-1)/n M. Either of the others: k (l-1) slices inside, k-1 across, where an exchange
             of all pairs sends n-l across.
Must divide: each of k > 1 nodes holds l > 1 members (rule `hierarchy-needs-even-nodes`).
Source:      Thakur et al., 2005 (pairwise exchange); Patarasuk and Yuan, 2009 (ring).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS
from echelon.core.choices.registry import load_reference
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.parallel.transport.messages import GlooPeers


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Say which member of a group this is; `per_node` of its members are on each node."""

    place: int
    size: int
    per_node: int


@dataclass(frozen=True, slots=True)
class Part:
    """Name the elements from `start` to `stop` of a flat tensor."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Return how many elements it has."""
        return self.stop - self.start

    def chunk(self, index: int, count: int) -> Part:
        """Return chunk `index` (modulo `count`) of `count`, as equal as whole elements allow."""
        index %= count
        first = self.start + index * self.length // count
        return Part(first, self.start + (index + 1) * self.length // count)

    def chunks(self, count: int) -> tuple[Part, ...]:
        """Return all of `count` chunks, in order."""
        return tuple(self.chunk(index, count) for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold what goes to and comes from other members, by their places, all of it at once.

    What comes is added to what is there where `adds`, in this order, and replaces it otherwise.
    """

    sends: tuple[tuple[int, Part], ...] = ()
    receives: tuple[tuple[int, Part], ...] = ()
    adds: bool = False


StepMaker = Callable[[Member, int], tuple[Step, ...]]
"""Member and number of elements -> its steps."""


def steps_of(sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which this member of a group sums so many elements."""
    return _made(COLLECTIVE_ALGORITHMS[sums.algorithm].runner, sums, num_elements)


def scatter_steps_of(sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    """Return the steps after which member i owns slice i of a sum, of n equal slices."""
    return _made(COLLECTIVE_ALGORITHMS[sums.algorithm].scatter_runner, sums, num_elements)


def gather_steps_of(sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which all get the n equal slices, of which member i has slice i."""
    return _made(COLLECTIVE_ALGORITHMS[sums.algorithm].gather_runner, sums, num_elements)


def _made(runner: str, sums: SumGroup, num_elements: int) -> tuple[Step, ...]:
    make: StepMaker = load_reference(runner)
    return make(Member(place=sums.place, size=sums.size, per_node=sums.per_node), num_elements)


def ring_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member around all of its group."""
    return ring_over(range(member.size), member.place, Part(0, num_elements).chunks(member.size))


def ring_scatter_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return phase 1 alone, after which this member owns its own slice."""
    slices = Part(0, num_elements).chunks(member.size)
    return scatter_phase(range(member.size), member.place, slices, ahead=0)


def ring_gather_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return phase 2 alone, before which this member has its own slice."""
    slices = Part(0, num_elements).chunks(member.size)
    return gather_phase(range(member.size), member.place, slices, ahead=0)


def ring_over(places: Sequence[int], index: int, chunks: Sequence[Part]) -> tuple[Step, ...]:
    """Return the steps that sum `chunks` around the members at `places`, of which this is `index`.

    There are as many chunks as members. A ring of one has no steps.
    """
    return (*scatter_phase(places, index, chunks), *gather_phase(places, index, chunks))


def scatter_phase(
    places: Sequence[int], index: int, chunks: Sequence[Part], *, ahead: int = 1
) -> tuple[Step, ...]:
    """Return phase 1, after which this member owns the sum of chunk `index + ahead`."""
    size, last = len(places), index + ahead - 1
    after, before = places[(index + 1) % size], places[index - 1]
    return tuple(
        Step(
            sends=((after, chunks[(last - step) % size]),),
            receives=((before, chunks[(last - step - 1) % size]),),
            adds=True,
        )
        for step in range(size - 1)
    )


def gather_phase(
    places: Sequence[int], index: int, chunks: Sequence[Part], *, ahead: int = 1
) -> tuple[Step, ...]:
    """Return phase 2, in which each chunk goes around to all who do not have it.

    This member begins with chunk `index + ahead`.
    """
    size, own = len(places), index + ahead
    after, before = places[(index + 1) % size], places[index - 1]
    return tuple(
        Step(
            sends=((after, chunks[(own - step) % size]),),
            receives=((before, chunks[(own - step - 1) % size]),),
        )
        for step in range(size - 1)
    )


def tree_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member: up the tree, then down."""
    whole, place, size = Part(0, num_elements), member.place, member.size
    up: list[Step] = []
    down: list[Step] = []
    bit = 1
    while bit < size:
        if place & bit:
            up.append(Step(sends=((place - bit, whole),)))
            down.append(Step(receives=((place - bit, whole),)))
            break
        if place + bit < size:
            up.append(Step(receives=((place + bit, whole),), adds=True))
            down.append(Step(sends=((place + bit, whole),)))
        bit *= 2
    return (*up, *reversed(down))


def halving_doubling_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member of a group of a power of two."""
    return (*halving_steps(member, num_elements), *doubling_steps(member, num_elements))


def halving_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the way there, after which this member owns the sum of the chunk of its place."""
    return tuple(
        Step(sends=((other, theirs),), receives=((other, mine),), adds=True)
        for other, mine, theirs in _halves(member, num_elements)
    )


def doubling_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the way back, before which this member has the chunk of its place."""
    return tuple(
        Step(sends=((other, mine),), receives=((other, theirs),))
        for other, mine, theirs in reversed(_halves(member, num_elements))
    )


def _halves(member: Member, num_elements: int) -> list[tuple[int, Part, Part]]:
    """Return with whom this member exchanges halves, the one that it keeps, and the other."""
    whole, place, size = Part(0, num_elements), member.place, member.size
    found: list[tuple[int, Part, Part]] = []
    distance = size // 2
    while distance:
        other = place ^ distance
        mine, theirs = (_block(whole, one, distance, size) for one in (place, other))
        found.append((other, mine, theirs))
        distance //= 2
    return found


def _block(whole: Part, place: int, length: int, size: int) -> Part:
    """Return the aligned block of `length` chunks that the chunk of `place` is in."""
    first = place // length * length
    return Part(whole.chunk(first, size).start, whole.chunk(first + length - 1, size).stop)


def hierarchical_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps of one member, whose group lies node by node."""
    here = _Node(member)
    parts = Part(0, num_elements).chunks(member.per_node)
    across = ring_over(here.ring, here.node, parts[here.index].chunks(here.num_nodes))
    return (
        here.to_owners([(part,) for part in parts]),
        *across,
        here.to_all([(part,) for part in parts]),
    )


def hierarchical_scatter_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps after which this member owns the sum of its slice."""
    here = _Node(member)
    slices = here.slices_by_index(num_elements)
    across = scatter_phase(here.ring, here.node, slices[here.index], ahead=0)
    return here.to_owners(slices), *across


def hierarchical_gather_steps(member: Member, num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which this member, which has its slice, gets those of all others."""
    here = _Node(member)
    slices = here.slices_by_index(num_elements)
    across = gather_phase(here.ring, here.node, slices[here.index], ahead=0)
    return *across, here.to_all(slices)


@dataclass(frozen=True, slots=True)
class _Node:
    """Say where a member is: on which node, and which one of it; and speak to the others there."""

    member: Member

    @property
    def node(self) -> int:
        """Return the number of its node."""
        return self.member.place // self.member.per_node

    @property
    def index(self) -> int:
        """Return which one of its node it is."""
        return self.member.place % self.member.per_node

    @property
    def num_nodes(self) -> int:
        """Return k."""
        return self.member.size // self.member.per_node

    @property
    def ring(self) -> range:
        """Return the places of the members with its index, node by node."""
        return range(self.index, self.member.size, self.member.per_node)

    def slices_by_index(self, num_elements: int) -> list[tuple[Part, ...]]:
        """Return the slices of the members 0 of all nodes, of the members 1, and so on."""
        slices, local = Part(0, num_elements).chunks(self.member.size), self.member.per_node
        return [slices[index::local] for index in range(local)]

    def to_owners(self, parts: list[tuple[Part, ...]]) -> Step:
        """Return the step in which member j of the node gets its `parts[j]` from all to be added.

        The next neighbour comes first, so that not all of them send to the same one at once.
        """
        own = parts[self.index]
        return Step(
            sends=tuple((place, one) for index, place in self._others() for one in parts[index]),
            receives=tuple((place, one) for _, place in self._others() for one in own),
            adds=True,
        )

    def to_all(self, parts: list[tuple[Part, ...]]) -> Step:
        """Return the step in which member j of the node sends its `parts[j]` to all others."""
        own = parts[self.index]
        return Step(
            sends=tuple((place, one) for _, place in self._others() for one in own),
            receives=tuple((place, one) for index, place in self._others() for one in parts[index]),
        )

    def _others(self) -> list[tuple[int, int]]:
        """Return index and place of the others of the node, the next one first."""
        local = self.member.per_node
        indices = [(self.index + step) % local for step in range(1, local)]
        return [(index, self.node * local + index) for index in indices]


def run_steps(tensor: torch.Tensor, steps: tuple[Step, ...], peers: GlooPeers) -> None:
    """Run the steps of this member on `tensor`, in place; empty parts are not sent."""
    flat = tensor.view(-1)
    for step in steps:
        _run_step(flat, step, peers)


def _run_step(flat: torch.Tensor, step: Step, peers: GlooPeers) -> None:
    """Run one step; what lands outside the tensor is gone before the next one receives."""
    arrived = _exchange(step, peers, partial(_elements, flat), in_place=not step.adds)
    if step.adds:
        for part, landing in arrived:
            _elements(flat, part).add_(landing)


def _exchange(
    step: Step, peers: GlooPeers, read: Callable[[Part], torch.Tensor], *, in_place: bool
) -> list[tuple[Part, torch.Tensor]]:
    """Parts that one step received: `in_place`, where `read` has them, or in new tensors."""
    arrived: list[tuple[Part, torch.Tensor]] = []
    works: list[torch.distributed.Work] = []
    for place, part in step.receives:
        if part.length:
            there = read(part)
            landing = there if in_place else torch.empty_like(there)
            works.append(peers.receive(landing, place))
            arrived.append((part, landing))
    for place, part in step.sends:
        if part.length:
            works.append(peers.send(read(part), place))
    for work in works:
        work.wait()
    return arrived


def run_scatter(
    shard: torch.Tensor, whole: torch.Tensor, steps: tuple[Step, ...], peers: GlooPeers
) -> None:
    """Run the steps of a reduce-scatter, and fill `shard` with this member's slice of the sum.

    `whole` stays as it is, but for a `shard` that is a part of it: partial sums are made in what
    has landed, and go when they have been sent.
    """
    sums = _PartialSums(whole.view(-1))
    for step in steps:
        _add_step(sums, step, peers)
    own = Part(0, whole.numel()).chunk(peers.index, len(peers.ranks))
    shard.view(-1).copy_(sums.read(own))


def _add_step(sums: _PartialSums, step: Step, peers: GlooPeers) -> None:
    """Run one step of a reduce-scatter; what was sent is not needed any more."""
    for part, landing in _exchange(step, peers, sums.read, in_place=False):
        sums.add(part, landing)
    for _, part in step.sends:
        sums.forget(part)


class _PartialSums:
    """Hold the sums so far of parts of a flat tensor that stays as it is."""

    def __init__(self, flat: torch.Tensor) -> None:
        """Start with the tensor of this member alone."""
        self._flat = flat
        self._found: list[tuple[Part, torch.Tensor]] = []

    def read(self, part: Part) -> torch.Tensor:
        """Return the sum so far of a part."""
        made = self._made(part)
        return _elements(self._flat, part) if made is None else made

    def add(self, part: Part, landing: torch.Tensor) -> None:
        """Add what came for a part; the first that comes for it holds the sum from then on."""
        made = self._made(part)
        if made is None:
            self._found.append((part, landing.add_(_elements(self._flat, part))))
        else:
            made.add_(landing)

    def forget(self, part: Part) -> None:
        """Give back the memory of sums that are in a part."""
        self._found = [
            (there, made)
            for there, made in self._found
            if not (part.start <= there.start and there.stop <= part.stop)
        ]

    def _made(self, part: Part) -> torch.Tensor | None:
        for there, made in self._found:
            if there.start <= part.start and part.stop <= there.stop:
                return made[part.start - there.start : part.stop - there.start]
        return None


def _elements(flat: torch.Tensor, part: Part) -> torch.Tensor:
    return flat[part.start : part.stop]


class BackgroundWork:
    """A task that a thread has been given; `wait` raises what it raised."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task, self._ended = task, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the task; called by the thread."""
        try:
            with torch.no_grad():
                self._task()
        except BaseException as error:  # it is raised again where the result is waited for
            self._error = error
        finally:
            self._ended.set()

    def is_completed(self) -> bool:
        """Return whether the task has ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the task has ended."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class BackgroundThread:
    """One thread that runs tasks in the order in which they come; it ends with the process."""

    def __init__(self) -> None:
        """Start no thread before there is a task: processes are forked before that."""
        self._tasks: SimpleQueue[BackgroundWork] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, task: Callable[[], None]) -> BackgroundWork:
        """Let the thread run `task` after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="own collectives", daemon=True)
            self._thread.start()
        work = BackgroundWork(task)
        self._tasks.put(work)
        return work

    def _run(self) -> None:
        while True:
            self._tasks.get().run()
