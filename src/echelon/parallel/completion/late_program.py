# SPDX-License-Identifier: Apache-2.0
"""Late completion for a program that calls `torch.distributed` itself.

Each asynchronous collective or message of the program works on private copies. Its result appears
in `wait`, and not before. A buffer that is read or written too early is a race, with its line in
the code.
Calls that torch's own wrappers make (DDP, FSDP, pipelining) are left as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import BoundArguments, signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from echelon.parallel.completion.in_flight import (
    ALL_GATHER,
    InFlight,
    LateOperation,
    OperationName,
    Pair,
    Race,
)
from echelon.parallel.completion.late import InFlightWatch
from echelon.parallel.completion.memory import private_copy


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Names of arguments that a call reads, fills, or both."""

    reads: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    both: tuple[str, ...] = ()


_CALLS: Mapping[str, _Buffers] = {
    "all_reduce": _Buffers(both=("tensor",)),
    "reduce": _Buffers(both=("tensor",)),
    "broadcast": _Buffers(both=("tensor",)),
    ALL_GATHER: _Buffers(reads=("tensor",), fills=("tensor_list",)),
    "all_gather_into_tensor": _Buffers(reads=("input_tensor",), fills=("output_tensor",)),
    "reduce_scatter": _Buffers(reads=("input_list",), fills=("output",)),
    "reduce_scatter_tensor": _Buffers(reads=("input",), fills=("output",)),
    "all_to_all": _Buffers(reads=("input_tensor_list",), fills=("output_tensor_list",)),
    "all_to_all_single": _Buffers(reads=("input",), fills=("output",)),
    "isend": _Buffers(reads=("tensor",)),
    "irecv": _Buffers(fills=("tensor",)),
}
"""Calls of `torch.distributed` that may be asynchronous."""

_MESSAGES = ("isend", "irecv")
"""Calls that are asynchronous without being asked."""

_TORCH = str(Path(torch.__file__).parent)


class LateWork(dist.Work):
    """The handle of a call whose result appears in `wait`."""

    def __init__(self, real: Any, flight: InFlight, operation: LateOperation) -> None:
        """Hold the transport's own handle."""
        super().__init__()
        self._real, self._flight, self._operation = real, flight, operation

    def wait(self, timeout: Any = None) -> bool:
        """Let the result be seen."""
        self._flight.land(self._operation)
        return True

    def is_completed(self) -> bool:
        """True if the call is done; then its result is there."""
        done = bool(self._real.is_completed())
        if done:
            self.wait()
        return done

    def get_future(self) -> Any:
        """Return the transport's own future, once the result is there."""
        self.wait()
        return self._real.get_future()


class LateProgram:
    """Delay and watch the asynchronous calls of one rank's program."""

    def __init__(self, rank: int, seed: int) -> None:
        """Begin without races."""
        self.races: list[Race] = []
        self.name_of: Callable[[torch.Tensor], str] = lambda tensor: str(list(tensor.shape))
        self._flight = InFlight(rank, seed, self.races.append)
        self._begun: list[LateOperation] = []

    @property
    def num_operations(self) -> int:
        """Number of operations that have begun."""
        return self._flight.num_operations

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Have `torch.distributed` make late calls while the context lasts."""
        plain = {name: getattr(dist, name) for name in _CALLS}
        late = {name: self._late(name, call) for name, call in plain.items()}
        self._install(late)
        try:
            yield
        finally:
            self._install(plain)
            self._flight.close()

    @staticmethod
    def _install(calls: Mapping[str, Callable[..., Any]]) -> None:
        for name, call in calls.items():
            setattr(dist, name, call)
            if name in _MESSAGES:  # batches of messages compare with these
                setattr(distributed_c10d, name, call)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one step."""
        with InFlightWatch(self._flight):
            yield
        self._flight.end_step()

    @contextmanager
    def quiet(self, *, results: bool = False) -> Iterator[None]:
        """Let an observer of the rank read any memory; with `results`, of running calls, too."""
        if not results:
            with self._flight.unwatched():
                yield
            return
        with self._flight.observing():
            for operation in self._begun:
                self._flight.land(operation)
            yield
        self._begun = [operation for operation in self._begun if not operation.landed]

    def _late(self, kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        takes = signature(plain)

        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = takes.bind(*args, **kwargs)
            is_async = kind in _MESSAGES or bound.arguments.get("async_op")
            if not is_async or not _is_called_by_program():
                return plain(*args, **kwargs)
            with self._flight.unwatched():
                reads, fills = _made_private(kind, bound)
                work = plain(*bound.args, **bound.kwargs) if reads or fills else None
            if work is None:
                return plain(*args, **kwargs)
            return self._begin(kind, work, reads, fills)

        return call

    def _begin(
        self, kind: str, work: Any, reads: Sequence[Pair], fills: Sequence[Pair]
    ) -> LateWork:
        buffer = (*fills, *reads)[0][0]
        name = OperationName(kind=kind, name=self.name_of(buffer), axis="")
        done: list[bool] = []

        def complete() -> None:
            if not done:
                done.append(bool(work.wait()))

        operation = self._flight.begin(name, complete, reads=reads, writes=fills)
        self._begun = [begun for begun in self._begun if not begun.landed] + [operation]
        return LateWork(work, self._flight, operation)


def _made_private(kind: str, bound: BoundArguments) -> tuple[list[Pair], list[Pair]]:
    """Replace buffers of a call by private copies; return pairs that are read, and filled.

    Both are empty if a buffer is not contiguous: such a call is not delayed.
    """
    buffers, reads, fills = _CALLS[kind], list[Pair](), list[Pair]()
    replaced: dict[str, Any] = {}
    for names, pairs in ((buffers.reads, reads), (buffers.fills, fills), (buffers.both, fills)):
        for name in names:
            given = bound.arguments[name]
            tensors: list[torch.Tensor] = [*given] if isinstance(given, list | tuple) else [given]
            if not all(type(tensor) in _PLAIN and tensor.is_contiguous() for tensor in tensors):
                return [], []
            copies = [*map(private_copy, tensors)]
            pairs.extend(zip(tensors, copies, strict=True))
            replaced[name] = copies if isinstance(given, list | tuple) else copies[0]
    bound.arguments.update(replaced)
    return reads, fills


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_called_by_program() -> bool:
    """True if the program makes the call, and no wrapper of torch."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == distributed_c10d.__file__:
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_TORCH)
