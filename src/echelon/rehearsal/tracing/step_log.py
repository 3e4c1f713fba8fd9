# SPDX-License-Identifier: Apache-2.0
"""What one rank does in a step, one thing after the other, for its trace.

Only a rank whose trace is wanted writes this: its log, its memory and its counter of kernels are of
the kinds below, which append to one list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from echelon.rehearsal.log import Issue, RankLog
from echelon.rehearsal.memory import HOST, MemoryMeter
from echelon.rehearsal.work import KernelWork, WorkCounter


@dataclass(frozen=True, slots=True)
class ActionBegan:
    """Say that an action of the schedule began."""

    name: str


@dataclass(frozen=True, slots=True)
class ActionEnded:
    """Say that the action ended that had begun last."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Say that the device was given a kernel: its name, the bytes that it moves, its FLOPs."""

    name: str
    num_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Issued:
    """Say that a communicator was given an operation; `number` is its place in the log."""

    number: int
    issue: Issue


@dataclass(frozen=True, slots=True)
class Awaited:
    """Say that the operation was awaited that stands at a place in the log."""

    number: int


@dataclass(frozen=True, slots=True)
class HostWaited:
    """Say that the host read from the device: what asked for it, and where."""

    operation: str
    where: str


@dataclass(frozen=True, slots=True)
class Held:
    """Say what lives on the device from here on, by term."""

    by_term: Mapping[str, int]


StepItem: TypeAlias = ActionBegan | ActionEnded | Kernel | Issued | Awaited | HostWaited | Held


class StepLog:
    """Collect what a rank does in a step."""

    def __init__(self) -> None:
        """Begin without anything."""
        self.items: list[StepItem] = []

    def step_began(self, held: Mapping[str, int]) -> None:
        """Forget the step before; say what lives between the two."""
        self.items = [Held(held)]


class SteppedLog(RankLog):
    """A log that also writes into that of the step."""

    def __init__(self, rank: int, step: StepLog) -> None:
        """Begin without any entries."""
        super().__init__(rank)
        self._step = step

    def issue(self, one: Issue) -> int:
        """Write down an operation."""
        number = super().issue(one)
        self._step.items.append(Issued(number, one))
        return number

    def wait(self, issue: int) -> None:
        """Write down a wait."""
        super().wait(issue)
        self._step.items.append(Awaited(issue))

    def host_read(self, operation: str, where: str, task: str = "", what: str = "") -> None:
        """Write down that the host reads from the device."""
        super().host_read(operation, where, task, what)
        self._step.items.append(HostWaited(operation, where))


class SteppedMemory(MemoryMeter):
    """A meter that writes each change into the log of the step."""

    def __init__(self, step: StepLog) -> None:
        """Begin with nothing."""
        super().__init__()
        self._step = step

    def _add(self, term: str, num_bytes: int) -> None:
        super()._add(term, num_bytes)
        if term != HOST and num_bytes:
            self._step.items.append(Held(self.now()))


class SteppedWork(WorkCounter):
    """A counter that writes each kernel into the log of the step."""

    def __init__(self, step: StepLog) -> None:
        """Begin with none."""
        super().__init__()
        self._step = step

    def ran(self, task: str, kernel: KernelWork | None) -> None:
        """Count a kernel."""
        super().ran(task, kernel)
        if kernel is not None:
            self._step.items.append(Kernel(kernel.name, kernel.num_bytes, kernel.flops))
