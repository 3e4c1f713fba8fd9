# SPDX-License-Identifier: Apache-2.0
"""The schedule of a run, laid over the few steps of a proof.

A proof has a step on both sides of every change of phase: in warm-up and at its end, before and in
the decay, which is far enough on that another speed or start of it gives another rate. Where
something counts updates (bias corrections, a loss scale that changes, biases of experts) there are
five of them, so that one count off, or one that begins anew, is seen. No plan takes more steps than
it needs: most of the time of a proof goes by steps.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import Mathematics, Optimizer, Plan

ROUNDED_UPDATES = 3
"""Updates in the plan's own precision: one without history, one with, one after a rounded one."""

_LEAST_UPDATES = 3  # where nothing counts them
_COUNTED_UPDATES = 5  # where something does
_WARMUP_STEPS = 2
_MOST_OVERFLOWS = 2  # before a dynamic loss scale falls
_STEPS_OF_DECAY = 3
"""Where the decay begins, a third of it on, and two thirds."""
_ROUNDS = 2  # of local SGD: the second one has a momentum
_LONGEST_ROUND = 3  # steps
_STEPS_OF_LATE_DECAY = 2
"""The same of a decay that has a flat phase before it, which is seen too."""


def num_overflows(plan: Plan) -> int:
    """Return how many steps of a proof in float64 overflow, so that nothing is updated."""
    precision = plan.mathematics.precision
    dynamic = precision.loss_scaling == "dynamic"
    return min(precision.loss_scale_hysteresis, _MOST_OVERFLOWS) if dynamic else 0


def num_steps(plan: Plan) -> int:
    """Return the steps of a proof in float64, those that an overflow skips among them."""
    return num_updates(plan.mathematics) + num_overflows(plan)


def num_rounded_steps(plan: Plan) -> int:
    """Return the steps of a proof in the plan's own precision: the first of those in float64."""
    return ROUNDED_UPDATES + num_overflows(plan)


def num_updates(mathematics: Mathematics) -> int:
    """Return how many updates show every phase of the schedule, and every count."""
    optimizer = mathematics.optimizer
    counts = (
        # What does not follow the size of gradients is corrected by the number of updates.
        OPTIMIZERS[optimizer.kind].is_scale_free
        or mathematics.precision.loss_scaling == "dynamic"
        or (mathematics.model.experts is not None and mathematics.balance.has_bias)
    )
    warmup = _WARMUP_STEPS if optimizer.warmup_steps else 0
    after = 1 if optimizer.schedule == "constant" else _STEPS_OF_DECAY
    local = small_rounds(mathematics.local_sgd)
    rounds = _ROUNDS * local.every + local.delay
    return max(_COUNTED_UPDATES if counts else _LEAST_UPDATES, warmup + after, rounds)


def small_rounds(local: LocalSgd, layers: int | None = None) -> LocalSgd:
    """Return rounds of local SGD that are short enough for two of them in a proof.

    What comes late still does, and a model in fragments has several, at most one for each of its
    `layers`.
    """
    every = min(local.every, _LONGEST_ROUND)
    fragments = min(local.fragments, max(1, every), layers or local.fragments)
    return replace(
        local, every=every, fragments=fragments, delay=min(local.delay, max(0, every - 1))
    )


def small_schedule(plan: Plan) -> Optimizer:
    """Return the optimizer with a schedule whose phases all are in the steps of a proof.

    Steps that an overflow skips come after the first one, and take a place in the schedule.
    """
    optimizer, skipped = plan.mathematics.optimizer, num_overflows(plan)
    return replace(
        optimizer,
        warmup_steps=_WARMUP_STEPS + skipped if optimizer.warmup_steps else 0,
        decay_steps=_STEPS_OF_LATE_DECAY if optimizer.schedule == "wsd" else 0,
        total_steps=num_steps(plan),
    )
