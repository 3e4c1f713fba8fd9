# SPDX-License-Identifier: Apache-2.0
"""The same run with islands of local SGD on one device: one after another, and where they meet.

Each island is a training of the independent implementation over its part of the samples; how they
meet is as the oracle says it (`proof/oracle/local_sgd.py`), which the engine has no part in.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from echelon.core.plan import Plan
from echelon.layout.islands import island_plan
from echelon.proof.independent.training import IndependentRun, IndependentStep
from echelon.proof.oracle.local_sgd import as_sent, meets, outer_formula
from echelon.proof.whole_run.one_device import OneDeviceRun, batch_of_step, held_out_loss
from echelon.proof.whole_run.texts import RunTexts


def run_islands_on_one_device(
    plan: Plan, texts: RunTexts, num_steps: int, *, validated_after: Collection[int]
) -> OneDeviceRun:
    """Return the run of `plan` over the texts; it validates after so many steps, 0 among them."""
    local = plan.mathematics.local_sgd
    runs = [IndependentRun(island_plan(plan, index)) for index in range(local.islands)]
    outer = runs[0].values
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    met: dict[str, list[torch.Tensor]] = {}
    due: dict[int, list[str]] = {}
    steps: list[list[IndependentStep]] = [[] for _ in runs]
    validations: dict[int, float] = {}
    for step in range(num_steps):
        if step in validated_after:
            validations[step] = _validation(plan, texts, runs)
        for index, run in enumerate(runs):
            share = index, local.islands
            steps[index].append(run.step(batch_of_step(plan, texts, step, share)))
        values = [run.values for run in runs]
        due[step + local.delay] = [name for name in outer if meets(local, name, step)]
        for name in due[step + local.delay]:
            met[name] = [as_sent(local, outer[name] - own[name]) for own in values]
        changed = due.pop(step, [])
        for name in changed:
            mean = torch.stack(met[name]).sum(0) / local.islands
            outer[name], momentum[name] = outer_formula(local, outer[name], mean, momentum[name])
        for run, own in zip(runs, values, strict=True):
            kept = 0.5 if local.delay else 0.0
            run.begin_with({n: kept * own[n] + (1.0 - kept) * outer[n] for n in changed})
    if num_steps in validated_after:
        validations[num_steps] = _validation(plan, texts, runs)
    return OneDeviceRun(islands=tuple(map(tuple, steps)), validations=validations, weights=outer)


def _validation(plan: Plan, texts: RunTexts, runs: list[IndependentRun]) -> float:
    """Return the mean over all held-out tokens, of each island's part by its own weights."""
    passes = [
        held_out_loss(
            plan, texts.validation_tokens, run.values, (run.state, run.fp8), (index, len(runs))
        )
        for index, run in enumerate(runs)
    ]
    return sum(total for total, _ in passes) / sum(counted for _, counted in passes)
