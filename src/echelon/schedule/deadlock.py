"""Who waits for whom: the shortest circle of a deadlock, and what a transport must grant.

`stuck_cycle` looks at a schedule whose sends never wait. `send_window` and `shares_queue` look at
rendezvous: a transfer takes place only when its sender has posted the send *and* its receiver has
posted the receive, and the transfers of a channel take place in the order of the sends. There the
schedule becomes a graph whose nodes are actions and transfers; it runs to its end if and only if
the graph has no circle. Within a rank the order of its list already implies the dependencies
(`check.py` looks at that first), so only messages join one rank to another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from echelon.schedule.action import Action, Schedule
from echelon.schedule.dependencies import needs_of, result_of, run_lists
from echelon.schedule.messages import Channel, Message, Step, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One rank of a deadlock: the action that it cannot start, and the one that it waits for."""

    rank: int
    action: Action
    waits_for: Action
    on_rank: int


def stuck_cycle(schedule: Schedule) -> tuple[Wait, ...]:
    """Return the shortest circle of waiting ranks; () where every rank finishes.

    The schedule must be complete: what a rank waits for stands in some rank's list.
    """
    progress = run_lists(schedule)
    done = {result_of(action) for action in progress.order}
    owner = {
        result_of(action): (rank, action)
        for rank, row in enumerate(schedule.actions)
        for action in row
    }
    waits: dict[int, list[Wait]] = {}
    for rank, head in enumerate(progress.heads):
        if head < len(schedule.actions[rank]):
            action = schedule.actions[rank][head]
            for need in needs_of(action, schedule.num_stages):
                if need not in done:
                    on_rank, maker = owner[need]
                    wait = Wait(rank=rank, action=action, waits_for=maker, on_rank=on_rank)
                    waits.setdefault(rank, []).append(wait)
    circles = [_circle_through(rank, waits) for rank in waits]
    return min((circle for circle in circles if circle), key=len, default=())


def moves_that_finish(schedule: Schedule, circle: tuple[Wait, ...]) -> list[str]:
    """Return each move of one awaited action that frees every rank of a stuck `schedule`.

    In a circle a rank stands at an action while another waits for a later one of its list. Where
    that later one can run first, with all ranks' orders kept, it is named.
    """
    moves: list[str] = []
    for wait, following in zip(circle, circle[1:] + circle[:1], strict=True):
        if wait.waits_for == following.action:
            continue
        row = list(schedule.actions[wait.on_rank])
        row.remove(wait.waits_for)
        row.insert(row.index(following.action), wait.waits_for)
        actions = list(schedule.actions)
        actions[wait.on_rank] = tuple(row)
        moved = replace(schedule, actions=tuple(actions))
        if len(run_lists(moved).order) == sum(map(len, actions)):
            moves.append(f"on rank {wait.on_rank} {wait.waits_for} before {following.action}")
    return moves


def send_window(traffic: Traffic) -> int:
    """Return how many sends per channel a rank must be able to leave pending when it goes on.

    0: sends may block until they are received. k: before a rank goes on after posting a send, all
    but the last k on that channel must be complete, so k + 1 send buffers per channel suffice.
    The schedule must not deadlock with sends that never wait.
    """
    rendezvous = _Rendezvous.of(traffic)
    low, high, longest = 0, 0, max((len(sent) for sent in traffic.channels.values()), default=0)
    while high < longest and not _finishes(rendezvous.with_window(high)):
        low, high = high + 1, 2 * high + 1
    high = min(high, longest)
    while low < high:
        middle = (low + high) // 2
        if _finishes(rendezvous.with_window(middle)):
            high = middle
        else:
            low = middle + 1
    return low


def shares_queue(traffic: Traffic) -> bool:
    """Return whether both directions between two ranks may share one queue on each side.

    That is one NCCL communicator per pair without batching: operations of a pair run one at a
    time in the order in which each side posted them. Where this is False, each direction needs a
    group of its own (or sends and receives that meet must be posted as one batch).
    """
    graph = _Rendezvous.of(traffic).graph
    for rank, (steps, posts) in enumerate(zip(traffic.steps, traffic.receives, strict=True)):
        last: dict[int, Message] = {}
        for step, received in zip(steps, posts, strict=True):
            for message in (*received, *((step.send,) if step.send else ())):
                peer = message.target_rank if message.source_rank == rank else message.source_rank
                if peer in last:
                    graph[message].append(last[peer])
                last[peer] = message
    return _finishes(graph)


_Node: TypeAlias = "Action | Message"
_Graph: TypeAlias = "dict[_Node, list[_Node]]"
"""What each node waits for: a `Message` stands for its transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendezvous:
    """What waits for what; `after_send[c][k]` is what a rank does next after send k of channel c.

    A send that blocks holds up the next action of its rank and the receives posted for it.
    """

    graph: _Graph
    sent: dict[Channel, tuple[Message, ...]]
    after_send: dict[Channel, list[tuple[_Node, ...]]]

    @classmethod
    def of(cls, traffic: Traffic) -> _Rendezvous:
        """Return the graph of `traffic` with sends that are posted and not waited for."""
        sent = traffic.channels
        graph: _Graph = {message: [] for messages in sent.values() for message in messages}
        after_send: dict[Channel, list[tuple[_Node, ...]]] = {channel: [] for channel in sent}
        for steps, posts in zip(traffic.steps, traffic.receives, strict=True):
            previous: Step | None = None
            for step, received in zip(steps, posts, strict=True):
                graph[step.action] = [] if step.receive is None else [step.receive]
                if previous is not None:
                    for node in (step.action, *received):
                        graph[node].append(previous.action)
                    if previous.send is not None:
                        after_send[previous.send.channel].append((step.action, *received))
                if step.send is not None:
                    graph[step.send].append(step.action)
                previous = step
        for messages in sent.values():
            for before, message in pairwise(messages):
                graph[message].append(before)
        return cls(graph=graph, sent=sent, after_send=after_send)

    def with_window(self, window: int) -> _Graph:
        """Return the graph in which a rank leaves at most `window` sends per channel pending."""
        graph = {node: list(waits) for node, waits in self.graph.items()}
        for channel, messages in self.sent.items():
            for k, nodes in enumerate(self.after_send[channel][window:]):
                for node in nodes:
                    graph[node].append(messages[k])
        return graph


def _finishes(graph: _Graph) -> bool:
    """Return whether `graph` has no circle."""
    blocked = {node: len(waits) for node, waits in graph.items()}
    wakes: _Graph = {node: [] for node in graph}
    for node, waits in graph.items():
        for wait in waits:
            wakes[wait].append(node)
    ready = [node for node, count in blocked.items() if count == 0]
    finished = 0
    while ready:
        finished += 1
        for node in wakes[ready.pop()]:
            blocked[node] -= 1
            if blocked[node] == 0:
                ready.append(node)
    return finished == len(graph)


def _circle_through(rank: int, waits: dict[int, list[Wait]]) -> tuple[Wait, ...]:
    """Return the shortest circle of waits that leaves `rank` and comes back to it, if any."""
    paths: deque[tuple[Wait, ...]] = deque((wait,) for wait in waits[rank])
    seen: set[int] = set()
    while paths:
        path = paths.popleft()
        reached = path[-1].on_rank
        if reached == rank:
            return path
        if reached not in seen:
            seen.add(reached)
            paths.extend((*path, wait) for wait in waits.get(reached, ()))
    return ()
