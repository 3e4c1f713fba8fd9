"""What ranks run in these tests: an engine that trains, and on one rank one planted mistake."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan, Zero
from echelon.launch.context import RankContext
from echelon.launch.desync.connections import tcp_sockets
from echelon.models.batch import TokenBatch
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches
from tests.parallel.layouts import GPT2, MIXTRAL, plan_of
from tests.parallel.one_device import make_rows

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "exchange", "send", "receive")
FIRST_WRONG = 5
"""The step in which the mistake is made: there is a past then."""
WRONG_AT = "mistake made at"
"""Stands before the time of the mistake, on the monotonic clock, in what its rank prints."""
STEPS = 400
SLOW_S = 4.0
"""How long a rank computes that is only slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Say what rank `rank` does wrong, in its call `place` of group `group` in a step."""

    case: str
    rank: int
    group: str
    place: int = 0


_ATTACH_FILTER = 26
"""``SO_ATTACH_FILTER`` of Linux, which no module of Python names (socket(7))."""


class Silent:
    """Work that was begun and of which nothing arrives."""

    def is_completed(self) -> bool:
        """Return that it has not."""
        return False

    def wait(self) -> None:
        """Never return."""
        while True:
            time.sleep(60.0)


class Planted:
    """Stand before the calls of one group, and make one of them wrong."""

    def __init__(self, group: Group, mistake: Mistake) -> None:
        """Take over the calls of `group`."""
        self.group, self.mistake = group, mistake
        self.step = self.count = 0
        self.is_silent = False
        self.past: list[tuple[str, torch.Size, torch.dtype, str]] = []
        for name in CALLS:
            own = getattr(group, name)
            setattr(group, name, partial(self.call, name, own))

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step, self.count = step, 0
        if step < FIRST_WRONG:
            self.past = []

    def call(self, kind: str, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Make one call, rightly or not."""
        place, self.count = self.count, self.count + 1
        if self.step == FIRST_WRONG - 1:
            tensor = given[0]
            told = (torch.Size(()), torch.float64) if kind == "exchange" else _form(tensor)
            self.past.append((kind, *told, named["name"]))
        wrong = self.step == FIRST_WRONG and place == self.mistake.place
        if self.mistake.case == "dtype" and self.step >= FIRST_WRONG:
            wrong = place == self.mistake.place
        wrong = wrong or self.is_silent
        if not wrong:
            return own(*given, **named)
        tell_time()
        if self.mistake.case == "silent":
            self.is_silent = True
            return self.silently(kind, given, named)
        return self.wrongly(kind, own, *given, **named)

    def wrongly(self, kind: str, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Make the planted mistake in place of a call."""
        group = self.group
        match self.mistake.case:
            case "operation":
                whole = torch.zeros(group.size, dtype=torch.float64)
                if kind in ("all_gather", "reduce_scatter"):
                    return Group.all_reduce(group, whole, name=named["name"])
                return Group.all_gather(group, whole, whole[:1].clone(), name=named["name"])
            case "order":
                _, shape, dtype, name = self.past[self.mistake.place + 1]
                Group.all_reduce(group, torch.zeros(shape, dtype=dtype), name=name)
                return own(*given, **named)
            case "shape":
                return self.another(kind, given, named, torch.float64, 3)
            case "dtype":
                return self.another(kind, given, named, torch.int64, 1)
            case "missing":
                return Pending()
            case "extra":
                Group.all_reduce(group, torch.zeros(3), name="one more")
                return own(*given, **named)
            case "cut":
                cut_connections()
                return own(*given, **named)
        raise AssertionError(self.mistake.case)

    def silently(self, kind: str, given: Any, named: dict[str, Any]) -> Pending:
        """Begin a call, and send nothing, as of a transport of which the system tells nothing."""
        alike = given[1] if kind == "all_gather" else given[0]
        alike = None if kind == "exchange" else alike
        name = named["name"].partition(" from ")[0]
        number = self.group._begun(kind, name, alike, self.ends(kind, given))
        work: Any = Silent()
        return self.pending(Pending(work, recorder=self.group.recorder, number=number), named)

    def ends(self, kind: str, given: Any) -> tuple[int, int] | None:
        """Return the ends of a message."""
        if kind not in ("send", "receive"):
            return None
        mine, other = self.group.recorder.rank, self.group.ranks[given[1]]
        return (mine, other) if kind == "send" else (other, mine)

    def pending(self, pending: Pending, named: dict[str, Any]) -> Pending:
        """Wait for what is not asynchronous."""
        if named.get("async_op") is False or "async_op" not in named:
            pending.wait()
        return pending

    def another(
        self, kind: str, given: Any, named: dict[str, Any], dtype: torch.dtype, longer: int
    ) -> Any:
        """Make the call with other tensors: as many bytes of another dtype, or longer ones."""
        if kind in ("send", "receive"):
            tensor = torch.zeros(given[0].numel() * longer, dtype=dtype)
            if longer == 1:
                tensor = tensor.view(given[0].shape)
            getattr(Group, kind)(self.group, tensor, *given[1:], **named).wait()
            return Pending()
        if kind == "exchange":
            raise AssertionError("sizes of an exchange may differ")
        others = [
            torch.zeros((one.shape[0] * longer, *one.shape[1:]), dtype=dtype) for one in given
        ]
        return getattr(Group, kind)(self.group, *others, **named)


def cut_connections() -> None:
    """Cut this rank off: the system drops, without a word, whatever comes from other ranks.

    Nothing is acknowledged then, as when a cable is pulled. A launcher's store is left alone.
    """
    store = int(os.environ.get("MASTER_PORT", "0"))
    found = 0
    for one in tcp_sockets(without={store}):
        with one:
            deafen(one)
            found += 1
    assert found, "ranks are connected by TCP"


def deafen(one: socket.socket) -> None:
    """Drop whatever comes to a socket, before the system acknowledges it."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp": {"dp": 4},
    "dp-pair": {"dp": 2},
    "zero3": {"dp_shard": 4, "zero": Zero(stage=3)},
    "tp": {"tp": 4, "model": GPT2},
    "tp-dp": {"tp": 2, "dp": 2},
    "pp": {"pp": 4, "microbatches": 4},
    "pp-dp": {"pp": 2, "dp": 2},
    "cp": {"cp": 4, "sequence_length": 16},
    "ep": {"dp_shard": 4, "ep": 4, "model": MIXTRAL},
}
"""What a run is split over, by what tests call it."""


def plan_for(layout: str) -> Plan:
    """Return the plan of a layout."""
    return plan_of(**LAYOUTS[layout])


def train_wrongly(context: RankContext, argument: Mapping[str, Any]) -> str:
    """Train a `layout` for `steps`, and make the `mistake`, if any, in its step on its rank."""
    plan, steps = plan_for(argument["layout"]), argument.get("steps", STEPS)
    mistake = None if argument.get("mistake") is None else Mistake(**argument["mistake"])
    engine = TrainEngine(plan, Recorder(context.rank, NoEvents(), context.progress), context.device)
    planted: Planted | None = None
    mine = mistake is not None and mistake.rank == context.rank
    if mistake is not None and mine and mistake.group:
        planted = Planted(getattr(engine.groups, mistake.group), mistake)
    for step in range(steps):
        context.progress.mark(f"step {step}")
        if planted is not None:
            planted.begin(step)
        if mine and mistake is not None and not mistake.group and step == FIRST_WRONG:
            tell_time()
            if mistake.case == "slow":
                compute(SLOW_S)
            elif mistake.case != "link":  # which a test cuts from outside
                leave(mistake.case)
                return "left"
        engine.step(_batches(engine, step), step)
        time.sleep(0.01)
    return "ended"


def _batches(engine: TrainEngine, step: int) -> list[TokenBatch]:
    """Return the microbatches of this rank, of which it holds its own positions."""
    plan = engine.plan
    runs = engine.runs_for(plan.mathematics.sequence_length)
    return rank_batches(plan, make_rows(plan, step), engine.data_rank, step, runs=runs)


def tell_time() -> None:
    """Print when the mistake is made."""
    print(WRONG_AT, time.monotonic(), flush=True)


def leave(case: str) -> None:
    """Leave the program of the others in some way."""
    match case:
        case "return":
            return
        case "exception":
            raise ValueError("the planted error")
        case "loop":
            endless_loop()
        case "native":
            native_loop()


def compute(seconds: float) -> None:
    """Compute for some time, as a rank does that reads slowly or saves."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def endless_loop() -> None:
    """Compute for ever."""
    count = 0
    while count >= 0:
        count += 1


def native_loop() -> None:
    """Compute for ever without letting any other thread of this process run."""
    re.fullmatch("(a|a)*b", "a" * 80)
