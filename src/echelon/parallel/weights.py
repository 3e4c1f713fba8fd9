"""The weights of a rank: made empty, filled from the seed, and told as shards.

Each rank computes only its own slice of the initial values (`models/initial.py`), so no rank ever
holds the whole model and no seed checkpoint is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.models.initial import initial_values
from echelon.parallel.buckets import Bucket, Slot
from echelon.parallel.collectives import Group
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.shards import Shard


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give the parameters of a module made on the meta device their memory, zeroed."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            empty = torch.zeros(parameter.shape, device=device, dtype=dtype)
            setattr(owner, name, nn.Parameter(empty))


@torch.no_grad()
def fill_initial(
    module: nn.Module, plan: Plan, specs: Sequence[ParameterSpec], tensor: Group
) -> None:
    """Write this rank's part of the initial values into `module`; padding stays zero."""
    parameters = dict(module.named_parameters())
    for spec in specs:
        offset, size = rectangle(spec, tensor)
        values = initial_values(plan.model, spec, plan.mathematics.seed, offset=offset, size=size)
        _real(parameters[spec.name], spec, size).copy_(values)


def rectangle(spec: ParameterSpec, tensor: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of the part of a parameter that a tensor rank holds, no padding."""
    offset, size = [0] * len(spec.shape), list(spec.shape)
    if spec.split_dim is not None:
        start, end = spec.local_range(tensor.size, tensor.index)
        offset[spec.split_dim], size[spec.split_dim] = start, end - start
    return tuple(offset), tuple(size)


def bucket_shards(
    buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], groups: RankGroups
) -> dict[str, list[Shard]]:
    """Return what `tensors` (one flat tensor per bucket, in its layout) hold, by canonical name."""
    return dict(
        (slot.spec.name, [_shard(slot, flat, groups)])
        for bucket, flat in zip(buckets, tensors, strict=True)
        for slot in bucket.slots
    )


def _shard(slot: Slot, flat: torch.Tensor, groups: RankGroups) -> Shard:
    offset, size = rectangle(slot.spec, groups.tensor)
    local = flat[slot.start : slot.end].view(slot.parameter.shape)
    return Shard(
        name=slot.spec.name,
        global_shape=slot.spec.shape,
        offset=offset,
        tensor=_real(local, slot.spec, size),
        primary=slot.counted and groups.data.index == 0,
    )


def _real(local: torch.Tensor, spec: ParameterSpec, size: tuple[int, ...]) -> torch.Tensor:
    if spec.split_dim is None:
        return local
    return cast(torch.Tensor, local.narrow(spec.split_dim, 0, size[spec.split_dim]))
