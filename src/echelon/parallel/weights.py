"""The weights of a rank: made empty, filled from the seed, and told as shards.

Each rank computes only its own part of the initial values (`models/initial.py`): its tensor slice,
and at ZeRO stage 3 only its slice of that. So no rank ever holds the whole model, and no seed
checkpoint is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.models.initial import initial_values
from echelon.parallel.buckets import Bucket, Slot
from echelon.parallel.collectives import Group
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.rectangles import rectangles
from echelon.parallel.shards import Shard


def install(modules: Iterable[nn.Module], buckets: Sequence[Bucket]) -> None:
    """Put the parameters of the buckets in the places of those on the meta device.

    An embedding that two stages of a rank use is one parameter in both.
    """
    slots = {slot.spec.name: slot for bucket in buckets for slot in bucket.slots}
    for module in modules:
        for full_name in [name for name, _ in module.named_parameters()]:
            owner, _, name = full_name.rpartition(".")
            setattr(module.get_submodule(owner), name, slots[full_name].parameter)


def resting_values(bucket: Bucket) -> torch.Tensor:
    """Return the parameters of a bucket as they are kept between uses: whole, or a slice.

    What is still being written to where a slice rests is waited for.
    """
    if bucket.rest is not None:
        return bucket.rest.view(bucket.values_key)
    return bucket.value_slice if bucket.plan.sliced else bucket.values


@torch.no_grad()
def fill_initial(
    buckets: Sequence[Bucket], flats: Sequence[torch.Tensor], plan: Plan, groups: RankGroups
) -> None:
    """Write initial values into `flats`, one per bucket: whole, or its own slice.

    Padding is left as it is.
    """
    for bucket, flat in zip(buckets, flats, strict=True):
        for slot in bucket.slots:
            for piece in pieces(slot, flat, groups.tensor_of(slot.spec)):
                values = initial_values(
                    plan.model,
                    slot.spec,
                    plan.mathematics.seed,
                    offset=piece.offset,
                    size=tuple(piece.tensor.shape),
                )
                piece.tensor.copy_(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPiece:
    """Hold a view of a part of a parameter, and where in the whole parameter it starts."""

    offset: tuple[int, ...]
    tensor: torch.Tensor


def pieces(slot: Slot, flat: torch.Tensor, tensor: Group) -> Iterator[SlotPiece]:
    """Yield the rectangles of a parameter, padding cut off, that a flat tensor holds.

    `flat` has the layout of the slot's bucket: all of it, or the slice that this rank owns.
    """
    base = 0 if flat.numel() == slot.bucket.plan.num_elements else slot.bucket.own.start
    offset, size = rectangle(slot.spec, tensor)
    # Padding is at the end of dim 0, so what is real comes first; other dims have none.
    begin = max(slot.start, base)
    end = min(slot.start + prod(size), base + flat.numel())
    position = begin - base
    for place, part in rectangles(size, begin - slot.start, end - slot.start):
        numel = prod(part)
        yield SlotPiece(
            offset=tuple(a + b for a, b in zip(offset, place, strict=True)),
            tensor=flat[position : position + numel].view(part),
        )
        position += numel


def rectangle(spec: ParameterSpec, tensor: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
    return (groups.of_experts if bucket.plan.expert else groups.of_all).data.index == 0


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
                    offset=piece.offset,
                    tensor=piece.tensor,
                    primary=slot.counted and first_copy,
                )
                for piece in pieces(slot, flat, groups.tensor_of(slot.spec))
            ]
            if shards:
                found[slot.spec.name] = shards
    return found
