# SPDX-License-Identifier: Apache-2.0
"""Where each element of a rank's tensor lies in a parameter of one device.

A placement is what happens to an arange: the numbers 0, 1, 2, ... of a parameter's elements are
split, padded and flattened as its values are. What a rank then holds says where it belongs, for any
framework, and any slice of it too. Where a framework keeps values to itself, a call is put before a
method of one object, and taken off again: the class stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

PADDING = -1
"""The number of an element that no parameter of one device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedTensor:
    """Say for each element of a tensor of a rank, in its order, which one of one device it is.

    `names` are the parameters that it is made of, `owner` which of them an element belongs to,
    `index` its number there, or PADDING.
    """

    names: tuple[str, ...]
    owner: torch.Tensor
    index: torch.Tensor

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.index.numel()

    def pieces(
        self, values: torch.Tensor, start: int = 0
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, indices and values of what lies at `start` and after, parameter by parameter.

        `values` are flat, in the order of the tensor.
        """
        part = slice(start, start + values.numel())
        owner, index = self.owner[part], self.index[part]
        for number, name in enumerate(self.names):
            mine = (owner == number) & (index != PADDING)
            if bool(mine.any()):
                yield name, index[mine], values[mine]


def located(name: str, elements: torch.Tensor) -> LocatedTensor:
    """Return the place of a tensor that is of one parameter, from the numbers of its elements."""
    flat = elements.reshape(-1)
    return LocatedTensor(names=(name,), owner=torch.zeros_like(flat), index=flat)


def fused(parts: Sequence[tuple[str, torch.Tensor]], dim: int, groups: int = 1) -> LocatedTensor:
    """Return the place of a tensor that holds several parameters one after the other along `dim`.

    With `groups`, each part is cut into so many, and these are interleaved.
    """
    names = tuple(dict.fromkeys(name for name, _ in parts))
    owners, indices = [], []
    cut = [(names.index(name), elements.chunk(groups, dim)) for name, elements in parts]
    for group in range(groups):
        for owner, chunks in cut:
            indices.append(chunks[group])
            owners.append(torch.full_like(chunks[group], owner))
    return LocatedTensor(
        names=names,
        owner=torch.cat(owners, dim).reshape(-1),
        index=torch.cat(indices, dim).reshape(-1),
    )


def equal_slice(elements: torch.Tensor, dim: int, count: int, place: int) -> torch.Tensor:
    """Return the slice `place` of `count` equal ones along `dim`, padded where it does not divide.

    Vocabularies are padded so: each rank holds ceil(size / count), the last ones less and padding.
    """
    size = -(-elements.shape[dim] // count)
    start = min(place * size, elements.shape[dim])
    end = min(start + size, elements.shape[dim])
    part = elements.narrow(dim, start, end - start)
    return padded(part, dim, size)


def padded(elements: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return elements with padding up to `size` along `dim`."""
    missing = size - elements.shape[dim]
    if missing <= 0:
        return elements
    shape = list(elements.shape)
    shape[dim] = missing
    return torch.cat((elements, elements.new_full(shape, PADDING)), dim)


class Interposed:
    """Call `before` (and `after`, with the result) around a method of one object until removed."""

    def __init__(
        self,
        owner: Any,
        method: str,
        before: Callable[[], None],
        after: Callable[[Any], None] | None = None,
    ) -> None:
        """Put the calls around the method."""
        original = getattr(owner, method)

        @wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            before()
            result = original(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        self._owner = owner
        self._method = method
        self._own = vars(owner).get(method)
        setattr(owner, method, around)

    def remove(self) -> None:
        """Take the calls off: the object has what it had."""
        if self._own is None:
            delattr(self._owner, self._method)
        else:
            setattr(self._owner, self._method, self._own)
