"""The verbs as functions: what `import echelon as ec` gives as `ec.plan` and `ec.prove`.

Each raises the errors of `echelon.core.errors`; none prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.plan import Plan

if TYPE_CHECKING:
    from echelon.prove.proof import Proof


def plan(run: str | Path, *, cluster: str | None = None, settings: Sequence[str] = ()) -> Plan:
    """Return the plan of a run.toml or a preset, checked by every rule.

    `cluster` is a preset such as "8xh100"; `settings` are "table.key=value", as after `--set`.
    Raises ConfigError with every problem that there is.
    """
    from echelon.config.kinds import toml_text
    from echelon.config.load import load_job

    over = [] if cluster is None else [f"cluster.preset={toml_text(cluster)}"]
    return load_job(run, [*over, *settings]).plan


def prove(plan: Plan, *, subject: str | None = None) -> Proof:
    """Return the proof of `plan`: its ranks, started here, beside one process, tensor by tensor.

    The model is shrunk and the mesh kept. `subject` ("module:function") names another engine to put
    through the same claims. `proof.proven` is the answer; `proof.require()` raises ProofFailed.
    """
    from echelon.core.optional import optional_package

    optional_package("torch", extra="train", purpose="proving a plan")
    from echelon.launch.culprit import RankFailure
    from echelon.launch.pool import RankPool
    from echelon.prove.run import OUR_ENGINE
    from echelon.prove.run import prove as prove_on

    try:
        with RankPool(plan.mesh.world_size) as pool:
            return prove_on(plan, run_ranks=pool.run, subject=subject or OUR_ENGINE)
    except RankFailure as failure:
        # What is the user's to mend is said as it is, not as the failure of some rank.
        if failure.error is not None:
            raise failure.error from None
        raise
