"""What operations make of shapes, remembered: most are asked for thousands of times in a step.

On the meta device the result of an operation follows from the shapes, strides and dtypes of its
tensors and from its other arguments. The first time PyTorch works it out; after that it is made
from what is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from echelon.rehearsal.work import KernelWork, kernel_work

Key = tuple[Any, ...]

_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a new tensor."""


@dataclass(frozen=True, slots=True)
class Result:
    """Hold what an operation makes: new tensors, or which of its own it returns; and its work."""

    parts: tuple[_Made | int, ...]
    is_tuple: bool
    work: KernelWork | None


class KnownResults:
    """Run operations on shapes, each kind once."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._results: dict[Key, Result] = {}

    def run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
    ) -> tuple[Any, KernelWork | None]:
        """Return what an operation makes of `given`, its tensors, and what it costs a device."""
        key = (func, _key(args), *kwargs, _key(tuple(kwargs.values())))
        known = self._results.get(key)
        if known is not None:
            made = [
                given[part]
                if isinstance(part, int)
                else torch.empty_strided(part[0], part[1], dtype=part[2], device="meta")
                for part in known.parts
            ]
            return (tuple(made) if known.is_tuple else made[0]), known.work
        out = func(*args, **kwargs)
        work = kernel_work(func, given, (args, kwargs), out)
        found = _result(out, given, work)
        if found is not None:
            self._results[key] = found
        return out, work


def _result(out: Any, given: Sequence[torch.Tensor], work: KernelWork | None) -> Result | None:
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
    return Result(tuple(parts), is_tuple, work)


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _key(values: Sequence[Any]) -> Key:
    """Return what decides the results of these arguments; 1, 1.0 and True are three things."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += (value.shape, value.stride(), value.dtype, value.is_meta)
        elif isinstance(value, (list, tuple)):
            found.append(_key(value))
        else:
            found += (value.__class__, value)
    return tuple(found)
