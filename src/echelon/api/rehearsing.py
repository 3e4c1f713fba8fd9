# SPDX-License-Identifier: Apache-2.0
"""`ec.rehearse`: what the ranks of a plan would do on GPUs, found out without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.api.given_plan import GivenPlan, plan_from_given
from echelon.core.optional import optional_package
from echelon.layout.islands import without_losses

if TYPE_CHECKING:
    from echelon.rehearsal.run import Rehearsal


def rehearse(
    plan: str | Path | GivenPlan,
    *,
    whole: bool = False,
    workers: int | None = None,
    traces: str | Path | None = None,
) -> Rehearsal:
    """Return the actions of every distinct rank of `plan` in a step on GPUs under NCCL.

        found = ec.rehearse(ec.plan("llama3-70b", "64xh100"))

    The engine that trains is built and stepped on tensors without elements, so no GPU and no
    weights are needed, whatever the size. `found.faults` are calls that would hang, mix up or race,
    and reads that hold the host; `found.ranks` have the memory, the kernels and the bytes of one
    rank of each class; `found.require()` raises ProofFailed where anything is wrong.

    `plan` may also be a run.toml or preset, a plan.json or the folder of a run. A step has two
    rounds of its pipeline, or with `whole` all of its microbatches. `workers` are the processes
    that are used, one for each core by default. `traces` is a folder that is made, and gets a trace
    of each distinct rank, for chrome://tracing and ui.perfetto.dev; or NAME.json.gz, for a file
    NAME-RANK.json.gz of each.
    """
    optional_package("torch", extra="train", purpose="rehearsing a plan")
    from echelon.api.converting import read_plan
    from echelon.rehearsal.run import rehearse as rehearse_plan

    found = read_plan(plan)[0] if isinstance(plan, str | Path) else plan_from_given(plan)
    folder = None if traces is None else Path(traces)
    if found.mathematics.local_sgd.is_elastic:
        # Losses are of a run; the calls of a step are those of islands that lose none.
        found = without_losses(found)
    return rehearse_plan(found, workers=workers, whole=whole, traces=folder)
