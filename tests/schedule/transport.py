"""A small machine that runs a schedule message by message; it shares no code with the checker."""

from __future__ import annotations

from collections import deque

from echelon.schedule.messages import Message, ScheduleMessages


class Machine:
    """Run every rank's list over a rendezvous transport until nothing moves any more.

    `window` is how many sends per channel may be pending when a rank goes on (None: any number);
    `one_queue` lets both directions of a pair of ranks share one queue on each side.
    `buffered` lets a message arrive as soon as it is sent.
    """

    def __init__(
        self,
        traffic: ScheduleMessages,
        *,
        window: int | None = None,
        one_queue: bool = False,
        buffered: bool = False,
    ) -> None:
        """Put every rank before its first action."""
        self.traffic = traffic
        self.window = window
        self.one_queue = one_queue
        self.buffered = buffered
        self.place = [0] * len(traffic.steps)
        self.entered = [False] * len(traffic.steps)
        self.holds_for: list[Message | None] = [None] * len(traffic.steps)
        self.queues: dict[tuple[object, ...], deque[Message]] = {}
        self.moved: set[Message] = set()

    def finishes(self) -> bool:
        """Return whether every rank comes to the end of its list."""
        while any([*map(self._advance, range(len(self.place))), self._transfer()]):
            pass
        return all(
            place == len(row) for place, row in zip(self.place, self.traffic.steps, strict=True)
        )

    def _queue(self, rank: int, message: Message) -> deque[Message]:
        sends = message.source_rank == rank
        peer = message.target_rank if sends else message.source_rank
        key = (rank, peer) if self.one_queue else (rank, peer, sends)
        return self.queues.setdefault(key, deque())

    def _advance(self, rank: int) -> bool:
        row, place = self.traffic.steps[rank], self.place[rank]
        if place == len(row) or self._held(rank):
            return False
        step, before = row[place], self.entered[rank]
        if not before:
            for message in self.traffic.receives[rank][place]:
                self._queue(rank, message).append(message)
            self.entered[rank] = True
        if step.receive is not None and step.receive not in self.moved:
            return not before
        if step.send is not None:
            self._queue(rank, step.send).append(step.send)
            if self.buffered:
                self.moved.add(step.send)
        self.holds_for[rank] = step.send
        self.place[rank] += 1
        self.entered[rank] = False
        return True

    def _held(self, rank: int) -> bool:
        sent = self.holds_for[rank]
        if sent is None or self.window is None:
            return False
        queue = self.queues[(rank, sent.target_rank, True)]
        return len(queue) > self.window

    def _transfer(self) -> bool:
        for queue in list(self.queues.values()):
            if queue:
                message = queue[0]
                source = self._queue(message.source_rank, message)
                target = self._queue(message.target_rank, message)
                if source and target and source[0] == target[0] == message:
                    source.popleft()
                    target.popleft()
                    self.moved.add(message)
                    return True
        return False
