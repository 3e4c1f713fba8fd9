# SPDX-License-Identifier: Apache-2.0
"""The loop that runs the steps of a collective, in a thread beside the one that trains.

Over Gloo a message goes on without its host, a step that adds does not. So each communicator has
one thread, which runs what it is given in the order in which it was issued: as the backend runs its
own collectives, and the same on every member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from echelon.parallel.transport.algorithms.steps import Part, Step
from echelon.parallel.transport.messages import GlooPeers


def run_steps(tensor: torch.Tensor, steps: tuple[Step, ...], peers: GlooPeers) -> None:
    """Run the steps of this member on `tensor`, in place; empty parts are not sent."""
    flat = tensor.view(-1)
    for step in steps:
        _run_step(flat, step, peers)


def _run_step(flat: torch.Tensor, step: Step, peers: GlooPeers) -> None:
    """Run one step; what lands beside the tensor is gone before the next one receives."""
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    works: list[torch.distributed.Work] = []
    for place, part in step.receives:
        if part.length:
            there = _elements(flat, part)
            landing = torch.empty_like(there) if step.adds else there
            works.append(peers.receive(landing, place))
            arriving.append((there, landing))
    for place, part in step.sends:
        if part.length:
            works.append(peers.send(_elements(flat, part), place))
    for work in works:
        work.wait()
    if step.adds:
        for there, landing in arriving:
            there.add_(landing)


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
    arriving: list[tuple[Part, torch.Tensor]] = []
    works: list[torch.distributed.Work] = []
    for place, part in step.receives:
        if part.length:
            landing = torch.empty_like(sums.read(part))
            works.append(peers.receive(landing, place))
            arriving.append((part, landing))
    for place, part in step.sends:
        if part.length:
            works.append(peers.send(sums.read(part), place))
    for work in works:
        work.wait()
    for part, landing in arriving:
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
        """Hold a task that has not begun."""
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
