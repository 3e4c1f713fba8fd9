# SPDX-License-Identifier: Apache-2.0
"""What a rank and its supervisor say to each other; every message is one pickled value.

A job names its target, so that another process finds the function. A rank that failed says how
with a `RankFault`. A job may go on without some of its ranks: whole islands of local SGD.

A rank may be stopped in the middle of a message; its supervisor must still hear the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from echelon.core.choices.registry import loaded_plugins
from echelon.core.cluster import Backend
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.launch import TARGET_NOT_FOUND
from echelon.launch.context import GroupPlace, LostRank
from echelon.launch.desync.connections import Connections
from echelon.layout.islands import islands_of

_HEADER = struct.Struct("!I")
_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """Tell a new process which rank it is, before it knows any job."""

    rank: int
    log_path: str
    shown: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReference:
    """Name a function of a module; `file` is for modules that no import path leads to."""

    module: str
    name: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Say how long a rank may be quiet before the run is ended, in seconds.

    A stopped process is found by its state (`stopped_s`), long before any time limit. `silent_s`
    is for a process that runs but whose interpreter is held; `step_s` for a main thread that does
    not move although the process lives; `job_s` bounds the whole job where it is given. `still_s`
    is for a job in which every rank waits and none computes: no time would change that. A wait of
    `desync_s` makes the fingerprints of all ranks compared; None leaves none.
    """

    stopped_s: float = 3.0
    silent_s: float = 60.0
    join_s: float = 60.0
    step_s: float = 300.0
    job_s: float | None = None
    still_s: float | None = None
    desync_s: float | None = None

    @property
    def rendezvous_s(self) -> float:
        """Return the timeout of joining: we want to find the missing rank before the others do."""
        return self.join_s + 10.0

    @property
    def collective_s(self) -> float:
        """Return the timeout of collectives: we want to find a stuck rank before torch does."""
        return max(self.step_s, self.join_s) + 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """Ask a rank to call `target(context, argument)` in a fresh process group."""

    number: int
    """Number of the job, counted from the start of the ranks."""
    target: TargetReference
    """The function to call."""
    argument: object
    """What it is called with, beside the context."""
    labels: tuple[str, ...]
    """The label of each rank."""
    backend: Backend
    """The backend of the process group."""
    port: int
    """Port of the store on this host."""
    limits: Limits
    """How long ranks may be quiet."""
    introduce: bool
    """Whether all ranks compare code, torch and configuration first."""
    plugins: tuple[str, ...] = field(default_factory=loaded_plugins)
    """The plugins that the supervisor has loaded."""
    rings: str = ""
    """The folder of the rings of fingerprints; "" where ranks leave none."""
    elastic: ElasticRanks | None = None
    """Ranks that the job goes on without; None where every rank is needed."""
    attempt: int = 0
    """How often this rank was started again."""
    lost: tuple[LostRank, ...] = ()
    """Ranks that were lost before it was."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return len(self.labels)


class Notice(Enum):
    """Say what needs no more words, to a rank or (the last two) by it."""

    LEAVE_GROUP = "every rank is done: leave the process group"
    NO_MORE_JOBS = "there will be no more jobs"
    STOP = "stop at the next step boundary"
    TELL_STACKS = "tell where your threads are"
    GROUP_JOINED = "this rank is in the process group"
    ANSWERS_STOP = "a request to stop is answered with a result from here on"


@dataclass(frozen=True, slots=True)
class ExitRequest:
    """Tell a rank to exit at once, and for whom."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Say that a rank is alive, how far it is, and what it waits for."""

    count: int
    doing: str
    waiting: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """Carry the result of the job."""

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStacks:
    """Carry the stack of every thread of a rank; `waiting` names the collective it is in.

    `turn` is the place of what it waits to do in an order in which all ranks' work can be done.
    `call` is what the main thread waits in if it does not compute, `place` the line of the user's
    program that it is at, `asleep` whether this line sleeps. `unfinished` is the fingerprint of the
    operation that its device has not come past, where its host reads from the device.
    `connections` tells what its TCP connections say.
    """

    text: str
    waiting: str
    turn: int | None = None
    call: str = ""
    place: str = ""
    asleep: bool = False
    unfinished: int | None = None
    connections: Connections | None = None


@dataclass(frozen=True, slots=True)
class ForkServerReady:
    """Say that the fork server has imported what ranks need; `problem` says why it cannot fork."""

    problem: str


@dataclass(frozen=True, slots=True)
class RankStarted:
    """Give the process id of a new rank."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """Give the exit code of a process, negative for a signal."""

    pid: int
    code: int


TargetFunction = Callable[..., Any]


def name_target(target: str | TargetFunction) -> TargetReference:
    """Return the name of `target`: ``"package.module:function"`` or a top-level function."""
    if isinstance(target, str):
        module, _, name = target.partition(":")
        if not (module and name):
            raise ConfigError(
                TARGET_NOT_FOUND.problem(f"{target!r} is not of the form package.module:function")
            )
        return TargetReference(module=module, name=name)
    if "<" in target.__qualname__ or target.__module__ == "__main__":
        raise ConfigError(
            TARGET_NOT_FOUND.problem(
                f"{target.__module__}:{target.__qualname__} cannot be imported by another process"
            )
        )
    file = getattr(sys.modules.get(target.__module__), "__file__", None) or ""
    return TargetReference(module=target.__module__, name=target.__qualname__, file=file)


def find_target(target: TargetReference) -> TargetFunction:
    """Return the function that `target` names, importing its module."""
    found: Any = _import(target)
    for part in target.name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(
            TARGET_NOT_FOUND.problem(f"{target.module} has no function {target.name}")
        )
    return found


def _import(target: TargetReference) -> ModuleType:
    try:
        return importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (target.module == missing or target.module.startswith(missing + ".")):
            raise
        if not target.file:
            raise ConfigError(
                TARGET_NOT_FOUND.problem(f"there is no module {target.module}")
            ) from error
    spec = importlib.util.spec_from_file_location(target.module, target.file)
    if spec is None or spec.loader is None:
        raise ConfigError(TARGET_NOT_FOUND.problem(f"{target.file} is not a Python module"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[target.module] = module
    spec.loader.exec_module(module)
    return module


class Channel:
    """Send and receive pickled messages over one end of a socket pair."""

    def __init__(self, sock: socket.socket, *, send_timeout_s: float | None = None) -> None:
        """Take over `sock`; a send that takes longer than `send_timeout_s` is a broken pipe."""
        self._socket = sock
        self._socket.settimeout(send_timeout_s)
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one message; OSError where the other side is gone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._socket.sendall(_HEADER.pack(len(body)) + body)

    def send_if_room(self, message: object) -> None:
        """Send one small message unless the other side has stopped reading."""
        if select.select([], [self._socket], [], 0)[1]:
            self.send(message)

    def send_with_descriptors(self, message: object, descriptors: list[int]) -> None:
        """Send one message and duplicates of open file descriptors with it."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            socket.send_fds(self._socket, [_HEADER.pack(len(body))], descriptors)
            self._socket.sendall(body)

    def receive_with_descriptors(self, most: int) -> tuple[object, list[int]]:
        """Wait for one message sent by `send_with_descriptors`; EOFError at the end."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, most)
        header += self._exactly(_HEADER.size - len(header))
        (size,) = _HEADER.unpack(header)
        return pickle.loads(self._exactly(size)), descriptors

    def receive(self, timeout_s: float) -> list[object]:
        """Return the whole messages that are here within `timeout_s`; EOFError at the end."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return []
        try:
            data = self._socket.recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the other side closed the channel")
        self._buffer += data
        return self._whole_messages()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _whole_messages(self) -> list[object]:
        messages: list[object] = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError("the other side closed the channel")
            data += part
        return bytes(data)


def channel_pair(*, send_timeout_s: float) -> tuple[Channel, socket.socket]:
    """Return our end as a channel and the other end as a socket to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours, send_timeout_s=send_timeout_s), theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRanks:
    """Say which islands a job goes on without, as long as enough of them are there.

    Each has a process group of its own, and every rank is in one: any of them may be lost, so the
    launcher hosts the store, and ranks of all others hear of it. What a rank raises that is no
    error of ours is a loss too, and so is one that hangs.
    """

    num_ranks: int
    """Ranks of all islands together."""
    least: int
    """How many islands must be there: with fewer the job ends."""
    restarts: int
    """How often each island is started again."""
    size: int = 1
    """How many consecutive ranks are an island: all of it is lost with one of them."""

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each island."""
        return tuple(
            tuple(range(start, start + self.size)) for start in range(0, self.num_ranks, self.size)
        )

    def island_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are lost with one of them."""
        return self.islands[rank // self.size]

    def name_of(self, rank: int) -> str:
        """Return what the island of a rank is called: ``island 1 (ranks 2 to 3)``."""
        island = self.island_of(rank)
        ranks = f"rank {rank}" if self.size == 1 else f"ranks {island[0]} to {island[-1]}"
        return f"island {rank // self.size} ({ranks})"


def group_place(
    elastic: ElasticRanks | None, rank: int, world_size: int, attempt: int
) -> GroupPlace:
    """Return the process group that a rank joins: of all ranks, or of its island."""
    if elastic is None:
        return GroupPlace(name="group", rank=rank, world_size=world_size)
    island = elastic.island_of(rank)
    name = f"group/{island[0]}/{attempt}"
    return GroupPlace(name=name, rank=island.index(rank), world_size=len(island))


def elastic_ranks(plan: Plan) -> ElasticRanks | None:
    """Return the islands without which a run of a plan goes on; None of all others."""
    local = plan.mathematics.local_sgd
    if not local.active or local.min_islands == "all":
        return None
    return ElasticRanks(
        num_ranks=plan.mesh.world_size,
        least=local.min_islands,
        restarts=local.restarts,
        size=islands_of(plan)[0].size,
    )
