# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a step: a linear warm-up, then constant, linear, cosine or WSD."""

from __future__ import annotations

import math

from echelon.core.plan import Optimizer


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0).

    The last of `warmup_steps` has the whole rate; the decay reaches `final_ratio` of it at
    `total_steps`, the first step that is not taken. "wsd" (warm-up, stable, decay: Hu et al.,
    MiniCPM, 2024) falls linearly over the last `decay_steps` only.
    """
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    return peak * _decay(optimizer, step)


def _decay(optimizer: Optimizer, step: int) -> float:
    final, end = optimizer.final_ratio, optimizer.total_steps
    if optimizer.schedule == "constant":
        return 1.0
    stable = optimizer.schedule == "wsd"
    start = end - optimizer.decay_steps if stable else optimizer.warmup_steps
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, end - start))
    if optimizer.schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0 - (1 - final) * progress
