# SPDX-License-Identifier: Apache-2.0
"""What tensor ranks must agree on, looked at in the first step: batches, gradients, buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isinf
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import MODULE_TENSOR_RANKS
from echelon.layout.modules import ModuleSplit
from echelon.parallel.module.tensor.layers import TensorLink
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group

_Sums = tuple[float, float, float]
"""The sum of a tensor, that of its absolute values, and by which part of that they may differ."""

_ALIKE = 1e-2
"""By how much squares of equal gradients may differ: reductions of some backends round."""


def watch_first_batch(model: nn.Module, group: Group) -> None:
    """Raise RunFailed on every rank in the first forward where tensor ranks are given others."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        leaves, _ = tree_flatten((args, kwargs))
        mine = [_digest(leaf) for leaf in leaves if torch.is_tensor(leaf)]
        everyone = group.gather_objects(mine)
        odd = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if odd:
            raise RunFailed(
                MODULE_TENSOR_RANKS.problem(
                    f"tensor ranks 0 and {odd[0]} are given other inputs in the first forward",
                    suggestions=("batches[optimizer.data_rank]",),
                )
            )

    handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def watch_first_stream(head: nn.Module, link: TensorLink) -> None:
    """Raise RunFailed on every rank in the first forward where a split head is given others.

    All tensor ranks give it the same stream. Nothing is said where somebody else watches
    (`link.watches`).
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        if not link.watches:
            return
        leaves, _ = tree_flatten((args, kwargs))
        mine = [sums_of(leaf) for leaf in leaves if torch.is_tensor(leaf)]
        everyone: list[list[_Sums]] = link.group.gather_objects(mine)
        odd = [rank for rank, other in enumerate(everyone) if not alike(everyone[0], other)]
        if odd:
            raise RunFailed(
                MODULE_TENSOR_RANKS.problem(
                    f"tensor ranks 0 and {odd[0]} have other values after the blocks in the first "
                    "forward, from the same inputs: the forward depends on the rank, or a rule is "
                    "wrong",
                    suggestions=("a forward that is the same on every rank",),
                )
            )

    def alike(one: Sequence[_Sums], other: Sequence[_Sums]) -> bool:
        return len(one) == len(other) and all(map(same_sums, zip(one, other, strict=True)))

    handle = head.register_forward_pre_hook(before, with_kwargs=True)


def check_equal_gradients(
    buckets: Sequence[Bucket], split: ModuleSplit, group: Group, world: Group
) -> None:
    """Raise RunFailed on every rank where a whole parameter's gradients differ over tensor ranks.

    Called when data ranks have summed them; each rank looks at the slice that it has.
    """
    if group.size == 1:
        return
    cut = {piece.name for piece in split.pieces}
    mine: dict[str, float] = {}
    for bucket in buckets:
        for slot in bucket.slots:
            name = slot.spec.name
            part = bucket.within_own_slice(slice(slot.start, slot.end))
            if name not in cut | split.summed and part.stop > part.start:
                mine[name] = float(bucket.gradient_slice[part].double().square().sum())
    everyone: list[dict[str, float]] = group.gather_objects(mine)
    largest = max((value for one in everyone for value in one.values()), default=0.0)
    seen = [
        name
        for name in mine
        if not _alike([one.get(name, float("nan")) for one in everyone], largest)
    ]
    told: list[list[str]] = world.gather_objects(seen)
    wrong = list(dict.fromkeys(name for names in told for name in names))
    if wrong:
        raise RunFailed(
            [
                MODULE_TENSOR_RANKS.problem(
                    f"the gradient of {name}, whole on every tensor rank, is not the same on all: "
                    "it works on values of which each rank has a part",
                    key="tensor",
                    suggestions=(f"tensor={{{name!r}: 'summed'}}",),
                )
                for name in wrong[:8]
            ]
        )


def check_equal_buffers(model: nn.Module, group: Group, world: Group) -> None:
    """Raise RunFailed on every rank where a forward has changed buffers unlike on tensor ranks.

    Called after the first step: until then they are those of the start, the same on all ranks.
    """
    if group.size == 1:
        return
    mine = {name: sums_of(one) for name, one in model.named_buffers() if not one.is_meta}
    everyone: list[dict[str, _Sums]] = group.gather_objects(mine)
    seen = [name for name in mine if not same_sums([one.get(name) for one in everyone])]
    told: list[list[str]] = world.gather_objects(seen)
    if wrong := list(dict.fromkeys(name for names in told for name in names)):
        raise RunFailed(
            [
                MODULE_TENSOR_RANKS.problem(
                    f"the buffer {name} is not the same on all tensor ranks after a step: it is "
                    "made of values of which each rank has a part",
                    suggestions=("mesh.sequence_parallel = false", "mesh.tp = 1"),
                )
                for name in wrong[:8]
            ]
        )


def sums_of(buffer: torch.Tensor) -> _Sums:
    """Return the sum of a buffer, that of its absolute values, and by which part they may round."""
    rounds = torch.finfo(buffer.dtype).eps ** 0.5 if buffer.is_floating_point() else 0.0
    wide = buffer.detach().double()
    return float(wide.sum()), float(wide.abs().sum()), rounds


def same_sums(sums: Sequence[_Sums | None]) -> bool:
    """Return whether tensors of these sums are the same but for rounding."""
    first = sums[0]
    if first is None or any(one is None for one in sums):
        return False
    limit = first[2] * first[1]
    return not any(one and abs(one[at] - first[at]) > limit for one in sums for at in (0, 1))


def _alike(squares: Sequence[float], largest: float) -> bool:
    if any(map(isinf, squares)):
        return True  # an overflow, of which the loss scale makes a skipped step
    return max(squares) - min(squares) <= _ALIKE * max(*squares, 1e-12 * largest)


def _digest(tensor: torch.Tensor) -> str:
    flat: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {hashlib.sha256(flat.tobytes()).hexdigest()[:16]}"
