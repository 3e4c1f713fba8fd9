# SPDX-License-Identifier: Apache-2.0
"""Memory by its addresses, and what fills it while nobody may read it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Span = tuple[int, int]
"""The first address, and the one after the last."""

_POISON_BYTE = 0xFF
"""All bits set: not a number in every floating dtype, those of eight bits too."""


def span_of(tensor: torch.Tensor) -> Span:
    """Return the addresses between which the elements of a tensor lie; (0, 0) for none."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    if not start:
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


def extent_of(tensor: torch.Tensor) -> Span:
    """The first byte of a tensor in its storage, and the one after its last."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    begin = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return begin * size, (begin + tensor.numel()) * size
    last = begin + sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin * size, (last + 1) * size


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the storage of a tensor from others that are alive."""
    return tensor.untyped_storage().data_ptr()


def overlap(one: Span, other: Span) -> bool:
    """Return whether two spans have an address in common."""
    return one[0] < other[1] and other[0] < one[1]


def touches(tensor: torch.Tensor, span: Span) -> bool:
    """Return whether an element of a tensor, strided or not, lies in a span."""
    own = span_of(tensor)
    if not overlap(own, span):
        return False
    if span[0] <= own[0] and own[1] <= span[1]:
        return True
    return any(overlap(run, span) for run in _runs(tensor))


def _runs(tensor: torch.Tensor) -> Iterator[Span]:
    """Yield the spans of contiguous parts that make up a tensor."""
    if tensor.is_contiguous():
        yield span_of(tensor)
        return
    widest = max(
        (dim for dim, size in enumerate(tensor.shape) if size > 1),
        key=tensor.stride,
    )
    for part in tensor.unbind(widest):
        yield from _runs(part)


def without(tensor: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a contiguous tensor, flat, that none of the other tensors lies in.

    An all-gather in place has its input in its output: that part is there all the time.
    """
    flat, (start, end) = tensor.view(-1), span_of(tensor)
    size, cuts = tensor.element_size(), [0]
    for begin, stop in sorted(span_of(other) for other in others):
        if overlap((begin, stop), (start, end)):
            cuts += [(max(begin, start) - start) // size, (min(stop, end) - start) // size]
    cuts.append(flat.numel())
    pairs = zip(cuts[::2], cuts[1::2], strict=True)
    return [flat[begin:stop] for begin, stop in pairs if stop > begin]


def part_of(private: torch.Tensor, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the part of a private copy that belongs to a part of its tensor, flat."""
    start = (part.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    return private.view(-1)[start : start + part.numel()]


def poison(tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor with what nobody takes for a result.

    NaN; of integers a negative number that is no index and no size. The version that autograd
    counts stays, as it does where a transport writes.
    """
    if tensor.dtype.is_floating_point:
        tensor.data.view(-1).view(torch.uint8).fill_(_POISON_BYTE)
    else:
        tensor.data.fill_(_absurd(tensor.dtype))


def is_poison(tensor: torch.Tensor) -> bool:
    """Return whether a contiguous tensor is as `poison` left it."""
    if tensor.dtype.is_floating_point:
        return bool((tensor.data.view(-1).view(torch.uint8) == _POISON_BYTE).all())
    return bool((tensor.data == _absurd(tensor.dtype)).all())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of one dtype hold the same bytes."""
    a, b = (tensor.data.view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(a, b)


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that nobody else knows of."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _absurd(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    limits = torch.iinfo(dtype)
    return limits.min // 3 if limits.min else limits.max
