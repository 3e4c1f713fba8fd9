"""What a rank and its supervisor say to each other; every message is one pickled value."""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.core.cluster import Backend
from echelon.core.errors import EchelonError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Tell a new process which rank it is, before it knows any job."""

    rank: int
    log_path: str
    shown: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Name a function of a module; `file` is for modules that no import path leads to."""

    module: str
    name: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Ask a rank to call `target(context, argument)` in a fresh process group.

    `introduce` asks all ranks to compare code, torch and configuration first.
    """

    number: int
    target: Target
    argument: object
    labels: tuple[str, ...]
    backend: Backend
    port: int
    join_timeout_s: float
    collective_timeout_s: float
    introduce: bool

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a rank that every rank is done: it may leave the process group."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell a rank that there will be no more jobs."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Ask a rank to stop at the next step boundary."""


@dataclass(frozen=True, slots=True)
class ShowStack:
    """Ask a rank where its threads are."""


@dataclass(frozen=True, slots=True)
class End:
    """Tell a rank to exit at once, and for whom."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Say that a rank is alive, how far it is, and what it waits for."""

    count: int
    doing: str
    waiting: str


@dataclass(frozen=True, slots=True)
class Joined:
    """Say that a rank is in the process group."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Carry the result of the job."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Carry what the job raised; `at` is on the machine's monotonic clock."""

    at: float
    summary: str
    traceback: str
    connection: bool
    error: EchelonError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Carry the stack of every thread of a rank; `waiting` names the collective it is in.

    `turn` is the place of what it waits to do in an order in which all ranks' work can be done.
    """

    text: str
    waiting: str
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class NurseryReady:
    """Say that the nursery has imported what ranks need; `problem` says why it cannot fork."""

    problem: str


@dataclass(frozen=True, slots=True)
class Spawned:
    """Give the process id of a new rank."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Give the exit code of a process, negative for a signal."""

    pid: int
    code: int
