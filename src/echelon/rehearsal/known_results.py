# SPDX-License-Identifier: Apache-2.0
"""What operations make of shapes, remembered: most are asked for thousands of times in a step.

On the meta device the result of an operation follows from the shapes, strides and dtypes of its
tensors and from its other arguments. The first time PyTorch works it out; after that it is made
from what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.rehearsal.work import KernelWork, kernel_work, tensors_in

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
                one = _empty(*part)
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
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


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


def _empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device="meta")
