# SPDX-License-Identifier: Apache-2.0
"""Proofs of what has no order before it runs: a run, what it recorded, and a replay."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.launch.local.messages import ElasticRanks, elastic_ranks
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.claims.claims import ClaimResult, first_failure, judge_claims
from echelon.proof.replays import asynchronous, lost_islands
from echelon.proof.replays.asynchronous import evidence_of, judge_asynchronous
from echelon.proof.replays.asynchronous_replay import Mistake
from echelon.proof.replays.lost_islands import (
    LOST_ISLAND_CLAIMS,
    MeetingMistake,
    lost_island_evidence,
)
from echelon.proof.replays.records import LOST_IN_ROUND, NUM_ROUNDS, read_rank, read_records
from echelon.proof.shrink import shrink
from echelon.proof.sum_bounds import with_exact_sums
from echelon.proof.verdict import ProofPass

_LOST_ISLAND = "echelon.proof.replays.records:run_with_a_loss"
_ASYNCHRONOUS = "echelon.proof.replays.records:run_asynchronous"


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


@contextmanager
def _ran(
    target: str, plan: Plan, steps: int, *, run_ranks: RankRunner, subject: str, elastic: bool
) -> Iterator[Path]:
    """Run ranks, and give the folder that they wrote to."""
    labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as directory:
        told = {
            "plan": plan.to_json(),
            "subject": subject,
            "num_steps": steps,
            "directory": directory,
        }
        dropped = elastic_ranks(plan) if elastic else None
        run_ranks(target, told, plan.mesh.world_size, labels=labels, elastic=dropped)
        yield Path(directory)


def diagnose_replay(
    results: Sequence[ClaimResult], mistakes: Iterator[Mistake | MeetingMistake], axis: str
) -> Diagnosis | None:
    """The first mistake that explains the first failure of a run; None if all claims hold."""
    failed = first_failure(results)
    if failed is None:
        return None
    result, failure = failed
    says = failure.detail or f"off by {failure.error:.2g}, allowed {failure.allowed:.0e}"
    finding = ProofFinding("none", says, axis, residual=failure.error)
    if mistake := next(mistakes, None):
        finding = replace(finding, factor=mistake.name, description=mistake.says)
    return Diagnosis.of(result, failure, finding, "")


def run_with_a_lost_island(plan: Plan, *, run_ranks: RankRunner, subject: str) -> ProofPass:
    """Return the claims of a run that loses an island in a meeting, and of its replay."""
    plan = shrink(with_exact_sums(plan), precision="fp64", names_apart=True)
    steps = NUM_ROUNDS * plan.mathematics.local_sgd.every
    with _ran(
        _LOST_ISLAND, plan, steps, run_ranks=run_ranks, subject=subject, elastic=True
    ) as folder:
        records = read_records(folder)
    evidence = lost_island_evidence(plan, steps, records)
    results = judge_claims(LOST_ISLAND_CLAIMS, evidence)
    last = plan.mathematics.local_sgd.islands - 1
    return ProofPass(
        precision=f"{plan.mathematics.precision.parameters}, island {last} lost",
        claims=results,
        diagnosis=diagnose_replay(
            results, lost_islands.explaining(evidence), Axis.DP_REPLICATE.value
        ),
        note=f"island {last} was killed in the meeting of round {LOST_IN_ROUND}; the recorded "
        "meetings were replayed",
    )


def replayed(plan: Plan, steps: int, *, run_ranks: RankRunner, subject: str) -> ProofPass:
    """Return the claims of a run of asynchronous servers, and of its replay in one process."""
    with _ran(
        _ASYNCHRONOUS, plan, steps, run_ranks=run_ranks, subject=subject, elastic=False
    ) as folder:
        ranks = [read_rank(folder, rank) for rank in range(plan.mesh.world_size)]
    evidence = evidence_of(plan, steps, ranks)
    results = judge_asynchronous(evidence)
    stale = max((one.version - one.read for said in ranks for one in said.applied), default=0)
    return ProofPass(
        precision=plan.mathematics.precision.parameters,
        claims=results,
        diagnosis=diagnose_replay(results, asynchronous.explaining(evidence), SERVERS_AXIS),
        note=f"the recorded order was replayed; the largest staleness was {stale}",
    )
