# SPDX-License-Identifier: Apache-2.0
"""Proofs of what has no order before it runs: a run, what it recorded, and a replay."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from echelon.core.plan import Plan
from echelon.launch.local.messages import ElasticRanks, elastic_ranks
from echelon.proof.asynchronous.claims import evidence_of, judge_asynchronous
from echelon.proof.asynchronous.mistakes import diagnose_asynchronous
from echelon.proof.asynchronous.record import read_rank
from echelon.proof.claims.claims import judge_claims
from echelon.proof.lost_islands.claims import (
    LOST_ISLAND_CLAIMS,
    diagnose_lost_island,
    lost_island_evidence,
)
from echelon.proof.lost_islands.record import LOST_IN_ROUND, NUM_ROUNDS, read_records
from echelon.proof.shrink import shrink
from echelon.proof.sum_bounds import with_exact_sums
from echelon.proof.verdict import ProofPass

_LOST_ISLAND = "echelon.proof.lost_islands.record:run_with_a_loss"
_ASYNCHRONOUS = "echelon.proof.asynchronous.record:run_asynchronous"


class RankRunner(Protocol):
    """Start ranks that call ``target(context, argument)`` in one process group, and wait.

    `launch.pool.RankPool.run` is one.
    """

    def __call__(
        self,
        target: str,
        argument: object,
        world_size: int,
        /,
        *,
        labels: Sequence[str],
        elastic: ElasticRanks | None = None,
    ) -> object:
        """Return when all ranks have; raise what the first failing rank raised.

        Ranks that are `elastic` are dropped when they are lost, and started again.
        """
        ...


def run_with_a_lost_island(plan: Plan, *, run_ranks: RankRunner, subject: str) -> ProofPass:
    """Return the claims of a run that loses an island in a meeting, and of its replay."""
    plan = shrink(with_exact_sums(plan), precision="fp64", names_apart=True)
    steps = NUM_ROUNDS * plan.mathematics.local_sgd.every
    labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as directory:
        told = {
            "plan": plan.to_json(),
            "subject": subject,
            "num_steps": steps,
            "directory": directory,
        }
        elastic = elastic_ranks(plan)
        run_ranks(_LOST_ISLAND, told, plan.mesh.world_size, labels=labels, elastic=elastic)
        records = read_records(Path(directory))
    evidence = lost_island_evidence(plan, steps, records)
    results = judge_claims(LOST_ISLAND_CLAIMS, evidence)
    last = plan.mathematics.local_sgd.islands - 1
    return ProofPass(
        precision=f"{plan.mathematics.precision.parameters}, island {last} lost",
        claims=results,
        diagnosis=diagnose_lost_island(evidence, results),
        note=f"island {last} was killed in the meeting of round {LOST_IN_ROUND}; the recorded "
        "meetings were replayed",
    )


def replayed(plan: Plan, steps: int, *, run_ranks: RankRunner, subject: str) -> ProofPass:
    """Return the claims of a run of asynchronous servers, and of its replay in one process."""
    mesh = plan.mesh
    labels = [mesh.label(rank) for rank in range(mesh.world_size)]
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as directory:
        told = {
            "plan": plan.to_json(),
            "subject": subject,
            "num_steps": steps,
            "directory": directory,
        }
        run_ranks(_ASYNCHRONOUS, told, mesh.world_size, labels=labels)
        ranks = [read_rank(Path(directory), rank) for rank in range(mesh.world_size)]
    evidence = evidence_of(plan, steps, ranks)
    results = judge_asynchronous(evidence)
    stale = max((one.version - one.read for said in ranks for one in said.applied), default=0)
    return ProofPass(
        precision=plan.mathematics.precision.parameters,
        claims=results,
        diagnosis=diagnose_asynchronous(evidence, results),
        note=f"the recorded order was replayed; the largest staleness was {stale}",
    )
