# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a split module tell one another in a step, and what they refuse together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import FROZEN_CHANGED, RANKS_IN_STEP, UNUSED_PARAMETER
from echelon.parallel.module.module import RankModule

_SHOWN = 8  # names in a message


def agree_on_step(
    module: RankModule, rate: float, norm_squared: float, num_unused: int
) -> tuple[float, int]:
    """Exchange what every rank must know of a step, in one small all-gather.

    Return the squares of the gradient, and how many parameters got none, over all ranks.
    RunFailed, on every rank, where what must be the same is not.
    """
    groups = module.groups
    # Whole gradients count on one data rank, slices on those of one replica.
    sliced = module.plan.layout.zero.stage > 0
    counts = (groups.replicate if sliced else groups.data).index == 0
    row = torch.tensor(
        [norm_squared if counts else 0.0, float(num_unused), float(_has_changed(module)), rate],
        dtype=torch.float64,
        device=module.device,
    )
    rows = groups.world.gather_rows(row, name="step")
    with groups.recorder.reading("what all ranks say of the step"):
        rows = rows.cpu()
    total = rows.sum(0)
    if total[2]:
        raise RunFailed(
            FROZEN_CHANGED.problem(
                f"requires_grad of parameters has changed on {int(total[2])} ranks"
            )
        )
    if bool((rows[:, 3] != rate).any()):
        rates = ", ".join(f"{value:g}" for value in rows[:, 3].tolist())
        raise RunFailed(RANKS_IN_STEP.problem(f"the learning rates of the ranks are {rates}"))
    return float(total[0]), int(total[1])


def refuse_unused(module: RankModule, mine: Sequence[str], step: int) -> None:
    """Raise RunFailed, on every rank the same: which parameters got no gradient, and where."""
    everyone: list[list[str]] = module.groups.world.gather_objects(list(mine))
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(everyone):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    order = [one.spec.name for one in module.parameters]
    problems = [
        UNUSED_PARAMETER.problem(
            f"{name} got no gradient in step {step} on {_describe_ranks(ranks, len(everyone))}",
            key="unused",
            suggestions=('parallelize(..., unused="zero")', f"ignore=[{name!r}]"),
        )
        for name, ranks in sorted(ranks_of.items(), key=lambda one: order.index(one[0]))
    ]
    raise RunFailed(problems[:_SHOWN])


def _has_changed(module: RankModule) -> bool:
    """Return whether a parameter is trained that was not, or the other way round."""
    named = dict(module.model.named_parameters())
    return any(named[one.spec.name].requires_grad is not one.trained for one in module.parameters)


def _describe_ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
