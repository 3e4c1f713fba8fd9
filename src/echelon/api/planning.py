"""`ec.plan`, `ec.compare`, `ec.prove`, `ec.bisect`: plans, side by side and beside one process.

A run file or preset becomes a Plan; a model and a cluster become the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config.rules.plan import require_trainable
from echelon.core.optional import optional_package
from echelon.core.plan import Plan

if TYPE_CHECKING:
    from echelon.planner.explain.compare import PlanComparison
    from echelon.planner.search.request import Objective
    from echelon.proof.bisect.verdict import Bisection
    from echelon.proof.claims.proof import Proof
    from echelon.proof.run import RankRunner


_MODULES_OF_PROOFS = (
    "echelon.proof.ranks",
    "echelon.training.subject",
    "echelon.training.whole_run",
)
"""What the ranks of a proof import: once, before they are forked."""


def plan(
    run: str | Path,
    *,
    cluster: str | None = None,
    settings: Sequence[str] = (),
    pins: Sequence[str] = (),
    objective: Objective | None = None,
) -> Plan:
    """Return the plan of a run.toml or a preset, checked by every rule, or the best one.

    `cluster` is a preset such as "8xh100"; `settings` are "table.key=value", as after `--set`. The
    preset of a model (or a config.json) says nothing of a layout: on a cluster it is searched for,
    and so is any other where there are `pins` such as "tp=8", or an `objective` ("time",
    "throughput", "devices", "expected"). Raises ConfigError with every problem that there is.
    """
    from echelon.config.cluster.settings import typed_cluster
    from echelon.config.load import load_job
    from echelon.planner.search.request import names_a_model

    if pins or objective is not None or (cluster is not None and names_a_model(run)):
        return _searched(run, cluster, settings, pins, objective or "time")
    typed = None if cluster is None else typed_cluster(cluster, f'cluster="{cluster}"')
    return load_job(run, settings, typed=typed).plan


def _searched(
    run: str | Path,
    cluster: str | None,
    settings: Sequence[str],
    pins: Sequence[str],
    objective: Objective,
) -> Plan:
    from echelon.planner.recommend.recommend import Recommendation, recommend
    from echelon.planner.search.no_plan import explain_no_plan
    from echelon.planner.search.request import SearchAim, make_request

    aim = SearchAim(objective=objective, top=1)
    found = recommend(make_request(run, cluster=cluster, settings=settings, pins=pins, aim=aim))
    answer = found.answer if isinstance(found, Recommendation) else found
    if answer.interrupted:
        raise KeyboardInterrupt
    if answer.best is None or answer.best.plan is None:
        raise explain_no_plan(answer)
    return answer.best.plan


def compare(a: str | Path | Plan, b: str | Path | Plan) -> PlanComparison:
    """Return what differs between two plans, and what their ranks hold and send.

    Each is a plan, a run.toml or preset, a plan.json, or the folder of a run. Raises ConfigError
    where one cannot be read.
    """
    from echelon.api.converting import read_plan
    from echelon.planner.explain.compare import compare_plans

    plans = [one if isinstance(one, Plan) else read_plan(one)[0] for one in (a, b)]
    return compare_plans(*plans)


def prove(
    plan: Plan, *, subject: str | None = None, independent: bool = False, late: bool = False
) -> Proof:
    """Return the proof of `plan`: its ranks, started here, beside one process, tensor by tensor.

    The model is shrunk and the mesh kept. Where all holds, our trainer makes a whole run, from data
    on disk to text, with a resume under another layout. `subject` ("module:function") names another
    engine to put through the same claims, without that run. `independent` also compares the one
    process with a second implementation that shares no code with it, and with transformers where
    that is installed and has the model. With `late` all is run once more with operations that
    complete only when they are awaited, and must give the same bits.
    `proof.proven` is the answer; `proof.require()` raises ProofFailed.
    """
    if independent:
        optional_package("torch", extra="train", purpose="proving a plan")
        from echelon.proof.independent.naming import independent_pass
        from echelon.proof.independent.optimizers import require_formula

        require_formula(plan.mathematics.optimizer)
        proof = prove(plan, subject=subject, late=late)
        beside = independent_pass(proof.shrunk_plan, proof.num_steps)
        return replace(proof, independent=beside)
    with _ranks(plan, subject) as run_ranks:
        return _prove(plan, run_ranks=run_ranks, subject=subject, late=late)


def bisect(plan: Plan, *, subject: str | None = None, late: bool = False) -> Bisection | None:
    """Return the smallest run that fails its proof as `plan` does; None where `plan` is proven.

    Settings, axes of the mesh, blocks and microbatches are left out or halved as long as the same
    rule is broken; every run on the way is proven as `prove` does (`late` or not), on ranks started
    here.
    """
    with _ranks(plan, subject) as run_ranks:
        from echelon.proof.bisect.bisect import bisect as bisect_with

        return bisect_with(plan, partial(_prove, run_ranks=run_ranks, subject=subject, late=late))


def _prove(
    plan: Plan,
    *,
    run_ranks: RankRunner,
    subject: str | None,
    late: bool,
    own_precision: bool = True,
) -> Proof:
    """Prove a plan; of our own engine, where all of it holds, a whole run of the trainer too."""
    from echelon.proof.independent.optimizers import has_formula
    from echelon.proof.run import OUR_ENGINE
    from echelon.proof.run import prove as prove_on
    from echelon.proof.shrink import shrink
    from echelon.proof.whole_run.whole_run import whole_run_pass

    engine = subject or OUR_ENGINE
    proof = prove_on(
        plan, run_ranks=run_ranks, subject=engine, own_precision=own_precision, late=late
    )
    ours = subject is None and has_formula(plan.mathematics.optimizer)
    if not ours or not proof.proven:
        return proof
    small = shrink(plan, precision="fp64")
    return replace(proof, whole_run=whole_run_pass(small, run_ranks=run_ranks))


@contextmanager
def _ranks(plan: Plan, subject: str | None) -> Iterator[RankRunner]:
    """Start the ranks of `plan`, which prove it, and smaller ones.

    Those of our own engine begin at once. What another is called may be wrong: that is told first.
    """
    require_trainable(plan)
    from echelon.config.rules.plan import require_offload_dir
    from echelon.launch.local.pool import RankPool
    from echelon.launch.root_cause import RankFailure
    from echelon.proof.shrink import shrink

    # What is proven is a small model; in float64 its slices are largest.
    require_offload_dir(shrink(plan, precision="fp64"), range(plan.mesh.world_size))
    try:
        with RankPool(plan.mesh.world_size, preloaded=_MODULES_OF_PROOFS) as pool:
            if subject is None:
                pool.begin()  # it imports torch, as this process does now
            optional_package("torch", extra="train", purpose="proving a plan")
            yield pool.run
    except RankFailure as failure:
        # What is the user's to mend is said as it is, not as the failure of some rank.
        if failure.error is not None:
            raise failure.error from None
        raise
