# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint of a trainer holds, and where parameters in flat buffers lie.

Data ranks share out such a buffer: a parameter may lie in the parts of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from echelon.core.errors import CheckpointError
from echelon.core.parameters import EMBEDDING
from echelon.core.rules import Rule
from echelon.training.weights.pickles import NotReadable, PickledTensor
from echelon.training.weights.stored import (
    DTYPE_SIZES,
    StoredBlock,
    StoredTensor,
    flat_blocks,
    whole,
)

SETTING = "train.weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter: means of its gradients, and of their squares."""


_WRAPPERS = ("model.", "module.", "model.module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCheckpoint:
    """Hold where the checkpoint of a trainer keeps its tensors, each by the trainer's own names.

    `moments` has those of the optimizer by kind; `step` is how many updates were made, None where
    no file says it. `told` says in words what it is.
    """

    told: str
    weights: Mapping[str, StoredTensor]
    moments: Mapping[str, Mapping[str, StoredTensor]] = field(
        default_factory=dict[str, Mapping[str, StoredTensor]]
    )
    step: int | None = None


def some(names: Iterable[object], limit: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    every = [str(name) for name in names]
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(islice(every, limit)) + more


def refuse(rule: Rule, message: str, *suggestions: object) -> CheckpointError:
    """Return the error of a checkpoint that cannot be started from."""
    return CheckpointError(rule.problem(message, key=SETTING, suggestions=suggestions))


def stored_tensor(tensor: PickledTensor) -> StoredTensor:
    """Return where a tensor of a pickle lies; NotReadable where its dims lie in another order."""
    if not tensor.contiguous:
        raise NotReadable(f"holds a tensor of {list(tensor.shape)} whose dims lie in another order")
    return whole(tensor.file, tensor.start, tensor.dtype, tensor.shape)


def unwrapped(weights: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return weights by Echelon's own names where a wrapper's name stands before each of them.

    Names of other families say by themselves where they begin.
    """
    for wrapper in _WRAPPERS:
        if f"{wrapper}{EMBEDDING}" in weights:
            return {name.removeprefix(wrapper): one for name, one in weights.items()}
    return dict(weights)


def moment_of(stored: Mapping[str, StoredTensor], key: str) -> StoredTensor | None:
    """Return the moment of a weight, which may be called with a wrapper or without."""
    names = [key, *(f"{wrapper}{key}" for wrapper in _WRAPPERS)]
    names += [key.removeprefix(wrapper) for wrapper in _WRAPPERS if key.startswith(wrapper)]
    return next((stored[name] for name in names if name in stored), None)


def slice_blocks(
    parts: Sequence[PickledTensor], begin: int, count: int, shape: Sequence[int], first: int
) -> Iterator[StoredBlock]:
    """Yield where `count` elements of a tensor, from its element `first` on, lie.

    They are those from `begin` on of `parts`, laid end to end. NotReadable where these end before.
    """
    end = begin + count
    start_of_part = 0
    for part in parts:
        low, high = max(begin, start_of_part), min(end, start_of_part + part.numel)
        if low < high:
            item = DTYPE_SIZES.get(part.dtype, 1)
            byte = part.start + (low - start_of_part) * item
            yield from flat_blocks(part.file, byte, item, shape, first + low - begin, high - low)
        start_of_part += part.numel
    if end > start_of_part:
        raise NotReadable(f"has flat buffers of {start_of_part} elements, and {end} are wanted")


def flat_tensor(parts: Sequence[PickledTensor], begin: int, shape: Sequence[int]) -> StoredTensor:
    """Return a tensor that lies from element `begin` on in `parts`, laid end to end."""
    dims = tuple(shape)
    blocks = tuple(slice_blocks(parts, begin, prod(dims), dims, 0))
    return StoredTensor(dtype=parts[0].dtype, shape=dims, blocks=blocks)


def shared_tensor(
    ranks: Sequence[Sequence[PickledTensor]], begin: int, shape: Sequence[int]
) -> StoredTensor:
    """Return a tensor of which each rank has an equal part, from element `begin` of its own on.

    The last parts are padded.
    """
    dims = tuple(shape)
    size = -(-prod(dims) // len(ranks))
    blocks: list[StoredBlock] = []
    for rank, parts in enumerate(ranks):
        first = rank * size
        count = min(size, prod(dims) - first)
        if count > 0:
            blocks.extend(slice_blocks(parts, begin, count, dims, first))
    return StoredTensor(dtype=ranks[0][0].dtype, shape=dims, blocks=tuple(blocks))
