# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: the shortest circle of a deadlock, and what a transport must grant.

`find_deadlock` looks at a schedule whose sends never wait. `send_window` and `shares_queue` look at
rendezvous: a transfer takes place only when its sender has posted the send *and* its receiver has
posted the receive, and the transfers of a channel take place in the order of the sends. There the
schedule becomes a graph whose nodes are actions and transfers; it runs to its end if and only if
the graph has no circle. Within a rank the order of its list already implies the dependencies
(`check.py` looks at that first), so only messages join one rank to another.

`draw_deadlock` draws a circle of waits: where each rank stands in its list, what it waits for.

    +-> rank 0:  F0.0 [BW0.0] (F0.1) BW0.1
    |              |  cannot start BW0.0 before BW1.0
    |              v
    |   rank 1:  F1.0 [F1.1] (BW1.0) BW1.1
    |              |  cannot start F1.1 before F0.1
    +--------------+

Each arrow leads to the rank that is waited for: there, what would end the wait stands in ( ),
behind the action in [ ] that cannot start, or in it: [(F1.1)].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from echelon.schedule.action import Action, Schedule
from echelon.schedule.messages import (
    ActionWithMessages,
    Channel,
    Message,
    ScheduleMessages,
    required_results,
    result_name,
    run_action_lists,
)
from echelon.schedule.rows import NO_FILE, ActionCells


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRank:
    """One rank of a deadlock: the action that it cannot start, and the one that it waits for."""

    rank: int
    action: Action
    awaited_action: Action
    awaited_rank: int


def find_deadlock(schedule: Schedule) -> tuple[BlockedRank, ...]:
    """Return the shortest circle of waiting ranks; () where every rank finishes.

    The schedule must be complete: what a rank waits for stands in some rank's list.
    """
    order, heads = run_action_lists(schedule)
    done = {result_name(action) for action in order}
    owner = {
        result_name(action): (rank, action)
        for rank, row in enumerate(schedule.actions)
        for action in row
    }
    waits: dict[int, list[BlockedRank]] = {}
    for rank, head in enumerate(heads):
        if head < len(schedule.actions[rank]):
            action = schedule.actions[rank][head]
            for need in required_results(action, schedule.num_stages):
                if need not in done:
                    on_rank, maker = owner[need]
                    wait = BlockedRank(
                        rank=rank, action=action, awaited_action=maker, awaited_rank=on_rank
                    )
                    waits.setdefault(rank, []).append(wait)
    circles = [_cycle_through(rank, waits) for rank in waits]
    return min((circle for circle in circles if circle), key=len, default=())


def moves_that_break_deadlock(schedule: Schedule, circle: tuple[BlockedRank, ...]) -> list[str]:
    """Return each move of one awaited action that frees every rank of a stuck `schedule`.

    In a circle a rank stands at an action while another waits for a later one of its list. Where
    that later one can run first, with all ranks' orders kept, it is named.
    """
    moves: list[str] = []
    for wait, following in zip(circle, circle[1:] + circle[:1], strict=True):
        if wait.awaited_action == following.action:
            continue
        row = list(schedule.actions[wait.awaited_rank])
        row.remove(wait.awaited_action)
        row.insert(row.index(following.action), wait.awaited_action)
        actions = list(schedule.actions)
        actions[wait.awaited_rank] = tuple(row)
        moved = replace(schedule, actions=tuple(actions))
        if len(run_action_lists(moved)[0]) == sum(map(len, actions)):
            moves.append(
                f"on rank {wait.awaited_rank} {wait.awaited_action} before {following.action}"
            )
    return moves


def send_window(traffic: ScheduleMessages) -> int:
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


def shares_queue(traffic: ScheduleMessages) -> bool:
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
    def of(cls, traffic: ScheduleMessages) -> _Rendezvous:
        """Return the graph of `traffic` with sends that are posted and not waited for."""
        sent = traffic.channels
        graph: _Graph = {message: [] for messages in sent.values() for message in messages}
        after_send: dict[Channel, list[tuple[_Node, ...]]] = {channel: [] for channel in sent}
        for steps, posts in zip(traffic.steps, traffic.receives, strict=True):
            previous: ActionWithMessages | None = None
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


def _cycle_through(rank: int, waits: dict[int, list[BlockedRank]]) -> tuple[BlockedRank, ...]:
    """Return the shortest circle of waits that leaves `rank` and comes back to it, if any."""
    paths: deque[tuple[BlockedRank, ...]] = deque((wait,) for wait in waits[rank])
    seen: set[int] = set()
    while paths:
        path = paths.popleft()
        reached = path[-1].awaited_rank
        if reached == rank:
            return path
        if reached not in seen:
            seen.add(reached)
            paths.extend((*path, wait) for wait in waits.get(reached, ()))
    return ()


_LEGEND = "[ ] cannot start      ( ) would end the wait of the rank whose arrow comes here"


def draw_deadlock(
    schedule: Schedule, circle: tuple[BlockedRank, ...], cells: ActionCells = NO_FILE
) -> str:
    """Return the circle that `find_deadlock` found as text; nothing where there is none."""
    if not circle:
        return ""
    return "\n".join([*_lines(schedule, circle, cells), _LEGEND]) + "\n"


def _lines(
    schedule: Schedule, circle: tuple[BlockedRank, ...], cells: ActionCells
) -> Iterator[str]:
    labels = [f"rank {wait.rank}:" for wait in circle]
    margin = max(map(len, labels)) + 2
    stem = " " * (margin + 2)
    awaited = circle[-1:] + circle[:-1]
    for place, (wait, before, label) in enumerate(zip(circle, awaited, labels, strict=True)):
        row = schedule.actions[wait.rank]
        arrow = "+-> " if place == 0 else "|   "
        yield arrow + label.ljust(margin) + _row(row, wait.action, before.awaited_action)
        at = f" ({cells.at(wait.rank, row.index(wait.action))})" if cells.source else ""
        yield f"|   {stem}|  cannot start {wait.action}{at} before {wait.awaited_action}"
        if place < len(circle) - 1:
            yield f"|   {stem}v"
    yield "+" + "-" * (len(stem) + 3) + "+"


def _row(row: tuple[Action, ...], stands_at: Action, awaited: Action) -> str:
    """Return the list of a rank around the two actions that matter, dots for what lies between."""
    head, wanted = row.index(stands_at), row.index(awaited)
    shown = sorted(
        place
        for place in {head - 2, head - 1, head, head + 1, wanted - 1, wanted, wanted + 1}
        if 0 <= place < len(row)
    )
    words: list[str] = []
    last = -1
    for place in shown:
        if place > last + 1:
            words.append("...")
        last = place
        word = f"({row[place]})" if place == wanted else str(row[place])
        words.append(f"[{word}]" if place == head else word)
    if last < len(row) - 1:
        words.append("...")
    return " ".join(words)
