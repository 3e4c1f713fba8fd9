# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer: a step from the mean of the outer gradients of all islands.

With the mean d of what islands moved away from the outer parameters p, of rate r and momentum u:

    sgd       p = p - r d                          Stich, 2018 (r = 1: the mean of islands)
    nesterov  m = u m + d;  p = p - r (d + u m)    Douillard et al., DiLoCo, 2023, section 2

as `torch.optim.SGD` writes them, without dampening.
"""

from __future__ import annotations

import torch

from echelon.core.choices.local_sgd import LocalSgd


def outer_update(
    local: LocalSgd,
    parameters: torch.Tensor,
    mean: torch.Tensor,
    momentum: torch.Tensor | None,
) -> None:
    """Update outer `parameters` in place, and `momentum`, which Nesterov's steps have.

    `mean` [the shape of both] is used up.
    """
    if momentum is not None:
        momentum.mul_(local.outer_momentum).add_(mean)
        mean.add_(momentum, alpha=local.outer_momentum)
    parameters.sub_(mean, alpha=local.outer_learning_rate)
