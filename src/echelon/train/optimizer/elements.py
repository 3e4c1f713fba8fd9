"""The update of one slice by a rule that treats each element alike (AdamW, SGD): fused calls.

One call updates everything that decays and one the rest, of which a slice mostly has but one. Where
values are also cast (a gradient to the dtype of the master copy, the copy to the parameters'), a
call takes as much as stays in cache between the passes, and memory for no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.train.optimizer.adamw import AdamW
from echelon.train.optimizer.parts import Operands, Part, in_calls, scale
from echelon.train.optimizer.sgd import Momentum

_CACHED = 1 << 20
"""Elements of a call on a CPU that casts too."""

_BUSY = 1 << 24
"""Elements of a call on a GPU that casts too: enough to keep it busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """What one bucket's update reads and writes on this rank.

    `target` is what is updated: the master copy, or `values` themselves. `scratch` says that
    `values` are a buffer: where there is a master copy, all of it is written.
    """

    gradient: torch.Tensor
    values: torch.Tensor
    target: torch.Tensor
    state: Sequence[torch.Tensor]
    scratch: bool


def update_elements(
    rule: AdamW | Momentum,
    slices: Slices,
    parts: Sequence[Part],
    *,
    rate: float,
    factor: float,
    weight_decay: float,
) -> None:
    """Update the target by `rule` from the gradient times `factor`, and the values with it."""
    target, gradient = slices.target, slices.gradient
    casts = target is not slices.values or gradient.dtype != target.dtype
    longest = (_CACHED if target.device.type == "cpu" else _BUSY) if casts else None
    for places, decays in in_calls(parts, longest):
        rule.update(
            Operands(
                targets=[target[place] for place in places],
                gradients=[scale(gradient[place], factor, target.dtype) for place in places],
                state=[[one[place] for place in places] for one in slices.state],
                rate=rate,
                weight_decay=weight_decay if decays else 0.0,
            )
        )
        if target is not slices.values and not slices.scratch:
            for place in places:
                slices.values[place] = target[place]
    if target is not slices.values and slices.scratch:
        slices.values.copy_(target)
