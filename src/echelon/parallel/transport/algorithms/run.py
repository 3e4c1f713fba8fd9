"""The loop that runs the steps of an all-reduce, in a thread beside the one that trains.

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
            self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
            self._thread.start()
        work = BackgroundWork(task)
        self._tasks.put(work)
        return work

    def _run(self) -> None:
        while True:
            self._tasks.get().run()
