# SPDX-License-Identifier: Apache-2.0
"""`ec.prove_module`: your own module under a plan beside one process, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.api.verifying import verify_here
from echelon.config.files.program import require_module
from echelon.core.optional import optional_package

if TYPE_CHECKING:
    from echelon.proof.verdict import SubjectProof

NUM_STEPS = 3
"""Optimizer steps where nobody says how many."""


def prove_module(
    factory: str | Path, plan: GivenPlan, *, num_steps: int = NUM_STEPS
) -> SubjectProof:
    """Return the proof that `ec.parallelize` under `plan` computes what one process does.

    `factory` is FILE:FUNCTION; the function returns a module, `batch(step, data_rank)`,
    `loss(module, batch)` and, if wanted, a mapping of what `parallelize` takes by name. For a plan
    with stages or context ranks, the loss is one of `parallelize` ("causal"), and batches are named
    tensors. It runs in float64, then in the dtype of the plan's parameters; ranks are started here,
    over Gloo.
    Losses, every gradient, optimizer state, updates and all parameters after `num_steps` are
    compared. `proof.proven` is the answer; `proof.require()` raises ProofFailed. ConfigError for a
    mistake in the file or a module that cannot be split; RunFailed for what the ranks refuse in
    their first step.
    """
    require_module(factory)
    optional_package("torch", extra="train", purpose="proving a module")
    from echelon.api.modules.subject import OPENER

    given = {
        "opener": OPENER,
        "plan": plan_from_given(plan).to_json(),
        "num_steps": num_steps,
    }
    return verify_here(Path(factory), given=given)
