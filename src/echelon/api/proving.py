"""`ec.prove`: a Plan beside one process, on ranks that are started and ended here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.config.effects import require_trainable
from echelon.core.optional import optional_package
from echelon.core.plan import Plan

if TYPE_CHECKING:
    from echelon.prove.proof import Proof


def prove(plan: Plan, *, subject: str | None = None) -> Proof:
    """Return the proof of `plan`: its ranks, started here, beside one process, tensor by tensor.

    The model is shrunk and the mesh kept. `subject` ("module:function") names another engine to put
    through the same claims. `proof.proven` is the answer; `proof.require()` raises ProofFailed.
    """
    require_trainable(plan)
    optional_package("torch", extra="train", purpose="proving a plan")
    from echelon.config.offload_dir import require_offload_dir
    from echelon.launch.culprit import RankFailure
    from echelon.launch.pool import RankPool
    from echelon.prove.run import OUR_ENGINE
    from echelon.prove.run import prove as prove_on
    from echelon.prove.shrink import shrink

    # What is proven is a small model; in float64 its slices are largest.
    require_offload_dir(shrink(plan, precision="fp64"), range(plan.mesh.world_size))
    try:
        with RankPool(plan.mesh.world_size) as pool:
            return prove_on(plan, run_ranks=pool.run, subject=subject or OUR_ENGINE)
    except RankFailure as failure:
        # What is the user's to mend is said as it is, not as the failure of some rank.
        if failure.error is not None:
            raise failure.error from None
        raise
