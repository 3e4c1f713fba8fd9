# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous worker and a server tell each other, over a link of their own.

    worker -> server    begin: step, version that it has, tokens of the step   3 numbers
                        the range of each bucket, as backward fills it
                        end: loss, squared norm, when the run is to stop       3 numbers
    server -> worker    version, loss, when the run is to stop                 3 numbers
                        the range of each bucket

Between two steps a worker may ask for the parameters as they are: `begin` says so. The server
answers as it answers a push.

A pair has a communicator of its own, so that a server waits for each worker in a thread of its own,
and a worker that is lost breaks its own links only. A worker that leaves says so in `begin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.servers.worker import GradientPush
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group, Pending

WORKER = 0
"""The place of a worker in a pair."""

SERVER = 1
"""The place of a server in a pair."""

NUMBERS = 3
"""Numbers, float64, of `begin`, of `end` and of what a server says beside its ranges."""

BEGIN = 0
"""The tag of the numbers with which a step begins."""

END = 1
"""The tag of those with which it ends, and of an answer."""

FIRST_BUCKET = 2
"""The tag of the first bucket; others follow in their order."""

ASKS_TO_STOP = -1
"""What stands for the step to stop after where a worker asks to: the first server says which."""

LEAVES = -1.0
"""The step of a worker that says that none follows."""

ASKS_FOR_PARAMETERS = -2.0
"""The step of a worker that pushes nothing, and asks for the newest parameters."""


def send_numbers(pair: Group, to: int, tag: int, *numbers: float) -> Pending:
    """Start to send a few numbers to the other end."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return pair.send(values, to, name="numbers", tag=tag)


def receive_numbers(pair: Group, sender: int, tag: int) -> list[float]:
    """Return a few numbers of the other end, once they have come."""
    values = torch.empty(NUMBERS, dtype=torch.float64)
    pair.receive(values, sender, name="numbers", tag=tag).wait()
    return values.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Say what a server answers a push: its version, the loss, after which step to stop (or 0)."""

    version: int
    loss: float
    stop_after: int


class WorkerMessages(GradientPush):
    """The messages of one worker: it pushes buckets as they fill, and pulls when it has ended."""

    def __init__(self, plan: Plan, groups: RankGroups) -> None:
        """Start with nothing under way."""
        super().__init__(plan, groups)
        pairs = groups.server_links.pairs
        self.pairs: Sequence[Group] = [pairs[rank] for rank in plan.mesh.server_ranks]
        self.versions = [0] * plan.mesh.servers
        self.started = False

    def begin(self, step: int, tokens: int) -> None:
        """Tell every server which step begins here, and with which of its versions."""
        self.started = True
        for pair, version in zip(self.pairs, self.versions, strict=True):
            send_numbers(pair, SERVER, BEGIN, step, version, tokens).wait()

    def end(self, loss: float, norm_squared: float, stop_after: int) -> None:
        """Tell every server that all gradients of the step are under way."""
        for pair in self.pairs:
            send_numbers(pair, SERVER, END, loss, norm_squared, stop_after).wait()

    def pull_newest(self, buckets: Sequence[Bucket], num_steps: int) -> None:
        """Pull the parameters as they are when every worker has done so many steps.

        Before the first step of a run a worker has them already.
        """
        if self.started:
            for pair in self.pairs:
                send_numbers(pair, SERVER, BEGIN, ASKS_FOR_PARAMETERS, num_steps, 0.0).wait()
            self.pull(buckets)

    def pull(self, buckets: Sequence[Bucket]) -> list[Reply]:
        """Return what each server answers, its range of every bucket being in its place."""
        found: list[Reply] = []
        arriving: list[Pending] = []
        for server, pair in enumerate(self.pairs):
            for bucket in buckets:
                part = self._ranges[bucket.index][server]
                if part:
                    arriving.append(
                        pair.receive(
                            bucket.values[part.start : part.stop],
                            SERVER,
                            name=f"parameters.{bucket.name}",
                            tag=FIRST_BUCKET + bucket.index,
                        )
                    )
        for server, pair in enumerate(self.pairs):
            version, loss, stop_after = receive_numbers(pair, SERVER, END)
            self.versions[server] = int(version)
            found.append(Reply(version=int(version), loss=loss, stop_after=int(stop_after)))
        for pending in arriving:
            pending.wait()
        return found

    def leave(self) -> None:
        """Tell every server that no step follows; one that is lost need not hear it."""
        if self.started:
            for pair in self.pairs:
                with suppress(RuntimeError):
                    send_numbers(pair, SERVER, BEGIN, LEAVES, 0.0, 0.0).wait()

    def _push(self, bucket: Bucket) -> Pending:
        whole = bucket.gradients.to(self._dtype)  # itself, where the dtype is the same
        sends: list[Pending] = []
        for pair, part in zip(self.pairs, self._ranges[bucket.index], strict=True):
            if part:
                piece = whole[part.start : part.stop]
                tag = FIRST_BUCKET + bucket.index
                sends.append(pair.send(piece, SERVER, name=f"gradients.{bucket.name}", tag=tag))
        return _All(sends, whole)


class _All(Pending):
    """Several messages as one; what they send lives as long."""

    __slots__ = ("_sends", "_sent")

    def __init__(self, sends: Sequence[Pending], sent: torch.Tensor) -> None:
        super().__init__()
        self._sends, self._sent = sends, sent

    def wait(self) -> None:
        """Return when all have left."""
        for pending in self._sends:
            pending.wait()
