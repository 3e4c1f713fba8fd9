"""Operations on tensors that have no elements: what a device would run, with nothing computed.

What the host reads from the device is written down, and made up: a number is one, a copy holds
ones. Where elements decide a shape there is nothing to make up: an error names the operation.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.rehearsal.in_flight import MemoryInFlight
from echelon.rehearsal.known_results import KnownResults
from echelon.rehearsal.log import RankLog
from echelon.rehearsal.memory import MemoryMeter
from echelon.rehearsal.work import WorkCounter, kernel_work, tensors_in

META = torch.device("meta")
_PACKAGE = str(Path(__file__).parents[1])
_HERE = str(Path(__file__).parent)
_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
_COPIES = frozenset({"_to_copy", "copy_"})
_NOTHING_TO_RUN = frozenset({"_fused_sgd_"})
"""Operations in place that PyTorch cannot run on shapes."""


class ShapesOnly(TorchDispatchMode):
    """Run what a rank runs on the meta device, and write down what it asks of its device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler to say so."""
        return False

    def __init__(self, log: RankLog) -> None:
        """Write host reads into `log`."""
        super().__init__()
        self.log = log
        self.memory, self.work, self.flight = MemoryMeter(), WorkCounter(), MemoryInFlight()
        self.task = self.reading = ""
        self._known = KnownResults()
        self._writes: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or make up what the host reads of it."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if name in _READS and given[0].device.type == "meta":
            self._read(name, given[0])
            return torch.ones((), dtype=given[0].dtype).item()
        if name in _COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
            if source.device.type == "meta" and torch.device(target).type == "cpu":
                self._read(name, source)
                if name == "copy_":
                    return args[0].fill_(1)
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        self._check(func, name, args, kwargs, given)
        if name in _NOTHING_TO_RUN:
            self.work.ran(self.task, kernel_work(func, given, (args, kwargs), None))
            return None
        out, kernel = self._known.run(func, args, kwargs, given)
        on_device = False
        for tensor in tensors_in(out):
            if tensor.device.type == "meta":
                self.memory.made(tensor)
                on_device = True
        if on_device or any(one.device.type == "meta" for one in given):
            self.work.ran(self.task, kernel)
        return out

    def _check(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[Any]
    ) -> None:
        """Look whether an operation touches what is in flight."""
        if not self.flight.anything():
            return
        if func not in self._writes:
            written = [
                (place, one.name, one.kwarg_only)
                for place, one in enumerate(func._schema.arguments)
                if one.alias_info is not None and one.alias_info.is_write
            ]
            self._writes[func] = (
                tuple(place for place, _, only in written if not only),
                tuple(named for _, named, _ in written),
            )
        places, names = self._writes[func]
        writes = [args[place] for place in places if place < len(args)]
        writes += [kwargs[named] for named in names if named in kwargs]
        targets = {id(one) for one in tensors_in(writes)}
        for tensor in given:
            if self.flight.holds(tensor):
                write = id(tensor) in targets
                self.flight.touched(tensor, write=write, by=name, where=where_in_package())

    def _read(self, operation: str, tensor: torch.Tensor) -> None:
        where = where_in_package()
        if self.flight.holds(tensor):
            self.flight.touched(tensor, write=False, by=operation, where=where)
        self.log.host_read(operation, where, self.task, self.reading)


def where_in_package() -> str:
    """Return the innermost place in this package that is not the rehearsal itself."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_HERE):
            return f"{Path(name).relative_to(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
