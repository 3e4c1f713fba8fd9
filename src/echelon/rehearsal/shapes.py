# SPDX-License-Identifier: Apache-2.0
"""Operations on tensors that have no elements: what a device would run, with nothing computed.

What the host reads from the device is written down, and made up: a number is one, a copy holds
ones. Where elements decide a shape there is nothing to make up: the rehearsal ends with an error
that names the operation.

On the meta device the result of an operation follows from the shapes, strides and dtypes of its
tensors and from its other arguments. Most are asked for thousands of times in a step: the first
time PyTorch works the result out, after that it is made from what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.errors import ProofFailed
from echelon.core.rulebook.planner import REHEARSE_HOST_READ
from echelon.parallel.completion.streams import COMPUTE, StreamOrder, StreamWork
from echelon.parallel.offload.host_memory import storage_key
from echelon.rehearsal.identity import DataNames
from echelon.rehearsal.memory import MemoryInFlight, MemoryMeter, where_in_package
from echelon.rehearsal.order import RankLog
from echelon.rehearsal.work import KernelWork, WorkCounter, kernel_work, tensors_in

META = torch.device("meta")
_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
_COPIES = frozenset({"_to_copy", "copy_"})
_NO_ELEMENTS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "zeros_like"}
)
"""Operations that neither read nor write elements of their arguments."""
_NOTHING_TO_RUN = frozenset({"_fused_sgd_"})
"""Operations in place that PyTorch cannot run on shapes."""


class _Operation:
    """What does not change from call to call of an operation of PyTorch; it keeps that alive."""

    __slots__ = (
        *("func", "is_copy", "is_read", "is_view", "keeps_elements", "name", "names", "places"),
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.name: str = func._schema.name.rpartition("::")[2]
        self.is_view: bool = func.is_view
        self.is_read, self.is_copy = self.name in _READS, self.name in _COPIES
        self.keeps_elements = self.name in ("_to_copy", "clone")
        written = [
            (place, one)
            for place, one in enumerate(func._schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        self.places = [place for place, one in written if not one.kwarg_only]
        self.names: list[str] = [one.name for _, one in written]


class ShapesOnly(TorchDispatchMode):
    """Run what a rank runs on the meta device, and write down what it asks of its device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler to say so."""
        return False

    def __init__(
        self,
        log: RankLog,
        known: KnownResults | None = None,
        *,
        memory: MemoryMeter | None = None,
        work: WorkCounter | None = None,
    ) -> None:
        """Write host reads into `log`; `known` is what operations make, as far as it is known.

        Memory and work are counted by `memory` and `work`, or by some of its own.
        """
        super().__init__()
        self.log = log
        self.memory, self.work = memory or MemoryMeter(), work or WorkCounter()
        self.flight = MemoryInFlight()
        self.data = DataNames(self.flight.tell)
        self.order = StreamOrder(self.flight.unordered)
        self.task = self.reading = ""
        self._known = known or KnownResults()
        self._operations: dict[int, _Operation] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or make up what the host reads of it."""
        operation = self._operations.get(id(func))
        if operation is None:
            operation = self._operations[id(func)] = _Operation(func)
        kwargs = kwargs or {}
        if operation.is_view:
            return func(*args, **kwargs)
        call, name = Call(func, args, kwargs), operation.name
        given = call.given
        if operation.is_read and given[0].device.type == "meta":
            self._read(name, given[0])
            return torch.ones((), dtype=given[0].dtype).item()
        if operation.is_copy:
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
            if source.device.type == "meta" and torch.device(target).type == "cpu":
                self._read(name, source)
                if name == "copy_":
                    return args[0].fill_(1)
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        held = self.flight.held_of(given)
        if held:
            self._touch(operation, args, kwargs, held)
        if name in _NOTHING_TO_RUN:
            self.work.ran(self.task, kernel_work(func, given, (args, kwargs), None))
            return None
        try:
            out, kernel, new = self._known.run(func, call, args, kwargs)
        except NotImplementedError as error:
            raise self._unknown(name) from error
        for tensor in new:
            self.memory.made(tensor)
            if operation.keeps_elements and given[0].is_meta:
                self.data.copied(given[0], tensor)
        self._note(operation, args, kwargs, given, new)
        if kernel is not None and (new or any(one.is_meta for one in given)):
            self.work.ran(self.task, kernel)
        return out

    def _unknown(self, operation: str) -> ProofFailed:
        """Return the error of an operation whose shape follows from elements: a host reads it."""
        at = f", in an action {self.task}" if self.task else ""
        return ProofFailed(
            REHEARSE_HOST_READ.problem(
                f"what {operation} makes at {where_in_package()} follows from numbers on the "
                f"device: the host waits for its shape{at}, and nothing after it can be rehearsed "
                f"(rank {self.log.rank})"
            )
        )

    def _touch(
        self,
        operation: _Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        held: Sequence[torch.Tensor],
    ) -> None:
        """Tell what an operation does to tensors that are in flight."""
        targets = _targets(operation, args, kwargs)
        for tensor in held:
            write = id(tensor) in targets
            self.flight.touched(tensor, write=write, by=operation.name, where=where_in_package())

    def _note(
        self,
        operation: _Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
    ) -> None:
        """Note the arguments and results that a kernel reads and writes."""
        if not self.order.follows or operation.name in _NO_ELEMENTS:
            return
        targets = _targets(operation, args, kwargs) if operation.names else frozenset[int]()
        # The place in the code is left out: a walk of the stack takes longer than the operation.
        work = StreamWork(by=operation.name, at=self.task)
        for tensor in given:
            self.order.uses(COMPUTE, tensor, work, writes=id(tensor) in targets)
        for tensor in new:
            self.order.uses(COMPUTE, tensor, work, writes=True)

    def _read(self, operation: str, tensor: torch.Tensor) -> None:
        where = where_in_package()
        if self.flight.holds(tensor):
            self.flight.touched(tensor, write=False, by=operation, where=where)
        self.log.host_read(operation, where, self.task, self.reading)


def _targets(
    operation: _Operation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> frozenset[int]:
    """Return the ids of the tensors that an operation writes."""
    writes = [args[place] for place in operation.places if place < len(args)]
    writes += [kwargs[named] for named in operation.names if named in kwargs]
    return frozenset(id(tensor) for tensor in tensors_in(writes))


Key = tuple[Any, ...]

_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a new tensor."""


class Call:
    """What an operation is given: its tensors, and what decides its results."""

    __slots__ = ("given", "key")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the arguments once."""
        self.given: list[torch.Tensor] = []
        key: list[Any] = [id(func)]
        _add_to(args, key, self.given)
        if kwargs:
            key += kwargs
            _add_to(kwargs.values(), key, self.given)
        self.key: Key = tuple(key)


@dataclass(frozen=True, slots=True)
class Result:
    """Hold what an operation makes: new tensors, or which of its own it returns; and its work.

    It keeps the operation alive, of whose identity its key is made.
    """

    func: Any
    parts: tuple[_Made | int, ...]
    is_tuple: bool
    work: KernelWork | None


class KnownResults:
    """Run operations on shapes, each kind once."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._results: dict[Key, Result] = {}

    def run(
        self, func: Any, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, KernelWork | None, Sequence[torch.Tensor]]:
        """Return what an operation makes, what that costs a device, and which tensors are new.

        A tensor that is not new is one of those that were given.
        """
        known = self._results.get(call.key)
        if known is None:
            return self._find(func, call, args, kwargs)
        made: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for part in known.parts:
            if isinstance(part, int):
                made.append(call.given[part])
            else:
                size, strides, dtype = part
                one = torch.empty_strided(size, strides, dtype=dtype, device="meta")
                made.append(one)
                new.append(one)
        return (tuple(made) if known.is_tuple else made[0]), known.work, new

    def _find(
        self, func: Any, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, KernelWork | None, Sequence[torch.Tensor]]:
        """Let PyTorch work it out, and remember it."""
        out = func(*args, **kwargs)
        work = kernel_work(func, call.given, (args, kwargs), out)
        found = _result(func, out, call.given, work)
        if found is not None:
            self._results[call.key] = found
        return out, work, [one for one in tensors_in(out) if one.device.type == "meta"]


def _result(
    func: Any, out: Any, given: Sequence[torch.Tensor], work: KernelWork | None
) -> Result | None:
    """Return what can be made again of a result; None where it is not tensors of its own."""
    is_tuple = isinstance(out, tuple)
    parts: list[_Made | int] = []
    for one in out if is_tuple else (out,):
        if not isinstance(one, torch.Tensor) or one.device.type != "meta":
            return None
        place = next((i for i, each in enumerate(given) if each is one), None)
        if place is not None:
            parts.append(place)
        elif one.storage_offset() or any(_shares(one, each) for each in given):
            return None
        else:
            parts.append((tuple(one.shape), tuple(one.stride()), one.dtype))
    return Result(func, tuple(parts), is_tuple, work)


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_key(one) == storage_key(other)


def _add_to(values: Iterable[Any], key: list[Any], given: list[torch.Tensor]) -> None:
    """Append what decides the results of these arguments, and their tensors.

    1, 1.0 and True are three things.
    """
    for value in values:
        kind = value.__class__
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            given.append(value)
            key += (value.shape, value.stride(), value.dtype, value.is_meta)
        elif kind is list or kind is tuple:
            key.append(len(value))
            _add_to(value, key, given)
        else:
            key += (kind, value)
