# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint of a trainer holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from echelon.core.errors import CheckpointError
from echelon.core.parameters import EMBEDDING
from echelon.core.rules import Rule
from echelon.training.weights.pickles import NotReadable, PickledTensor
from echelon.training.weights.stored import StoredTensor, whole

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
