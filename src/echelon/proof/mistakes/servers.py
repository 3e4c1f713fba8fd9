# SPDX-License-Identifier: Apache-2.0
"""Parameters of workers that are not those of their servers."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.proof.claims.checks import Evidence
from echelon.proof.claims.wrong_factors import EXPLAINED, relative_residual
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.oracle.oracle import OracleStep


def stale_versions(evidence: Evidence, oracle: OracleStep, name: str) -> Iterator[ProofFinding]:
    """Find values that servers have updated, while workers still have those before the update."""
    mesh, observed = evidence.plan.mesh, evidence.observed
    if not mesh.servers:
        return
    before = oracle.before[name].double()
    right = before + oracle.updates[name].total.double()
    of_workers = observed.whole("parameters", oracle.step, name)
    wrong: set[int] = set()
    for piece in observed.shards("parameters", oracle.step, name):
        if not mesh.is_server(piece.rank):
            continue
        moved = float((right[piece.region] - before[piece.region]).norm())
        late = of_workers[piece.region] - before[piece.region]
        updated = relative_residual(piece.tensor.double(), right[piece.region]) < EXPLAINED
        if moved and updated and float(late.norm()) < EXPLAINED * moved:
            wrong.add(mesh.server_ranks.index(piece.rank))
    if wrong:
        says = (
            f"server {' and '.join(map(str, sorted(wrong)))} has updated it, and workers go on "
            "with the version before: a stale version is taken for the new one"
        )
        yield ProofFinding("stale", says, SERVERS_AXIS)
