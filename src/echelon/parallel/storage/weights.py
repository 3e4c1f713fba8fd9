# SPDX-License-Identifier: Apache-2.0
"""The weights of a rank: made empty, filled from the seed, and told as shards of canonical tensors.

Each rank computes only its own part of the initial values (`models/counter_random.py`): its tensor
slice, and at ZeRO stage 3 only its slice of that. So no rank ever holds the whole model, and no
seed checkpoint is needed. Checkpoints and proofs know tensors by their canonical name and whole
shape only; whatever holds them (a flat bucket, a tensor slice, a pipeline stage) is told in shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.models.counter_random import initial_values
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.transport.collectives import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Hold a rectangle of a canonical tensor, padding already cut off.

    `tensor` (any shape of the rectangle) starts at `offset` in a tensor of `global_shape`.
    `primary` is True on exactly one of the ranks that hold the same rectangle.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    primary: bool


OffsetAndSize = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a rectangle."""


def range_as_rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[OffsetAndSize]:
    """Yield the fewest rectangles that are elements `start` to `stop` - 1 of a row-major tensor.

    They come in the order of the elements, and each is a contiguous run of them: for a matrix the
    rest of a row, whole rows, and the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        yield from _within_row(shape, last, start, stop)
        return
    yield from _within_row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within_row(shape, last, last * inner, stop)


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[OffsetAndSize]:
    base = row * prod(shape[1:])
    for offset, size in range_as_rectangles(shape[1:], start - base, stop - base):
        yield (row, *offset), (1, *size)


def install(modules: Iterable[nn.Module], buckets: Sequence[Bucket]) -> None:
    """Put the parameters of the buckets in the places of those on the meta device.

    An embedding that two stages of a rank use is one parameter in both.
    """
    slots = {slot.spec.name: slot for bucket in buckets for slot in bucket.slots}
    for module in modules:
        for full_name in [name for name, _ in module.named_parameters()]:
            owner, _, name = full_name.rpartition(".")
            setattr(module.get_submodule(owner), name, slots[full_name].parameter)


def stored_values(bucket: Bucket) -> torch.Tensor:
    """Return the parameters of a bucket as they are kept between uses: whole, or a slice.

    What is still being written to where a slice rests is waited for.
    """
    if bucket.offload_store is not None:
        return bucket.offload_store.view(bucket.values_key)
    return bucket.value_slice if bucket.plan.sliced else bucket.values


@torch.no_grad()
def fill_initial(
    buckets: Sequence[Bucket],
    flats: Sequence[torch.Tensor],
    plan: Plan,
    groups: RankGroups,
    device: torch.device,
    pieces: PieceSizes = TRAINING_PIECES,
) -> None:
    """Write initial values, made on `device`, into `flats`: one per bucket, whole or its own slice.

    Padding is left as it is. Tensors without elements get none: to draw them is a third of the
    time of a rehearsal of many matrices.
    """
    if device.type == "meta":
        return
    for bucket, flat in zip(buckets, flats, strict=True):
        for slot in bucket.slots:
            groups.recorder.mark(f"initial values of {slot.spec.name}")
            for offset, part in slot_rectangles(slot, flat, groups.tensor_group_for(slot.spec)):
                # What rests on the host is made where the run computes, too.
                here = part.device == device
                made = part if here else torch.empty_like(part, device=device)
                model, seed = plan.model, plan.mathematics.seed
                initial_values(model, slot.spec, seed, offset=offset, into=made, pieces=pieces)
                if not here:
                    part.copy_(made)


def slot_rectangles(
    slot: Slot, flat: torch.Tensor, tensor: Group
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the rectangles of a parameter, padding cut off, that a flat tensor holds.

    Each is a view, with where in the whole parameter it starts.
    `flat` has the layout of the slot's bucket: all of it, or the slice that this rank owns.
    """
    base = 0 if flat.numel() == slot.bucket.plan.num_elements else slot.bucket.own.start
    offset, size = tensor_rank_rectangle(slot.spec, tensor)
    # Padding is at the end of dim 0, so what is real comes first; other dims have none.
    begin = max(slot.start, base)
    end = min(slot.start + prod(size), base + flat.numel())
    position = begin - base
    for place, part in range_as_rectangles(size, begin - slot.start, end - slot.start):
        numel = prod(part)
        begins = tuple(a + b for a, b in zip(offset, place, strict=True))
        yield begins, flat[position : position + numel].view(part)
        position += numel


def tensor_rank_rectangle(
    spec: ParameterSpec, tensor: Group
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of the part of a parameter that a tensor rank holds, no padding."""
    offset, size = [0] * len(spec.shape), list(spec.shape)
    if spec.split_dim is not None:
        start, end = spec.local_range(tensor.size, tensor.index)
        offset[spec.split_dim], size[spec.split_dim] = start, end - start
    return tuple(offset), tuple(size)


def is_first_copy(bucket: Bucket, flat: torch.Tensor, groups: RankGroups) -> bool:
    """Return whether this is the first data rank that holds what `flat` is of a bucket."""
    if flat.numel() != bucket.plan.num_elements:
        return groups.replicate.index == 0
    return groups.data_groups(expert=bucket.plan.expert)[0].index == 0


def server_shards(
    buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], groups: RankGroups, *, primary: bool
) -> dict[str, list[Shard]]:
    """Return what `tensors`, the ranges of a parameter server, hold, by name."""
    found: dict[str, list[Shard]] = {}
    for bucket, flat in zip(buckets, tensors, strict=True):
        for slot in bucket.slots:
            for offset, part in slot_rectangles(slot, flat, groups.tensor):
                shard = Shard(
                    name=slot.spec.name,
                    global_shape=slot.spec.shape,
                    offset=offset,
                    tensor=part,
                    primary=primary,
                )
                found.setdefault(slot.spec.name, []).append(shard)
    return found


def bucket_shards(
    buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], groups: RankGroups
) -> dict[str, list[Shard]]:
    """Return what `tensors` (flat, one per bucket: whole, or the own slice) hold, by name.

    Of the ranks that hold the same piece, one is its primary holder. A parameter of which this rank
    holds nothing is absent.
    """
    found: dict[str, list[Shard]] = {}
    for bucket, flat in zip(buckets, tensors, strict=True):
        first_copy = is_first_copy(bucket, flat, groups)
        for slot in bucket.slots:
            shards = [
                Shard(
                    name=slot.spec.name,
                    global_shape=slot.spec.shape,
                    offset=offset,
                    tensor=part,
                    primary=slot.counted and first_copy,
                )
                for offset, part in slot_rectangles(slot, flat, groups.tensor_group_for(slot.spec))
            ]
            if shards:
                found[slot.spec.name] = shards
    return found
