# SPDX-License-Identifier: Apache-2.0
"""Every operation of torch in a step, looked at for memory that is not its to use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.parallel.completion.in_flight import InFlight

_LOOKS_AT_NOTHING = frozenset(
    {
        "_unsafe_view",
        "empty_like",
        "full_like",
        "is_pinned",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "record_stream",
        "resize_",
        "set_",
        "sym_size",
        "zeros_like",
    }
)
"""Operations that take shapes, dtypes and storages of tensors, and no elements."""

_OVERWRITES = frozenset({"copy_", "fill_", "normal_", "uniform_", "zero_"})
"""Operations in place that do not read what they write."""


class InFlightWatch(TorchDispatchMode):
    """Tell a ledger of every tensor whose elements an operation reads or writes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler to say so."""
        return False

    def __init__(self, flight: InFlight) -> None:
        """Watch for `flight`."""
        super().__init__()
        self._flight = flight

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at the tensors, then run the operation."""
        kwargs = kwargs or {}
        if self._flight.watches:
            access = _access_of(func)
            if access is not None:
                for place, value in (*enumerate(args), *kwargs.items()):
                    writes = place in access.written
                    for tensor in _tensors(value):
                        self._flight.use(
                            tensor,
                            by=access.name,
                            writes=writes,
                            reads=not (writes and access.overwrites),
                        )
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Access:
    """Say what an operation does with its arguments: which it writes, by place and by name."""

    name: str
    written: frozenset[int | str]
    overwrites: bool


@cache
def _access_of(func: Any) -> _Access | None:
    """Return how an operation uses memory; None where it looks at no elements."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    if func.is_view or name in _LOOKS_AT_NOTHING:
        return None
    written: set[int | str] = set()
    out = False
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
            out = out or argument.is_out
    return _Access(name, frozenset(written), out or name in _OVERWRITES)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        values: Iterable[Any] = value
        for one in values:
            yield from _tensors(one)
