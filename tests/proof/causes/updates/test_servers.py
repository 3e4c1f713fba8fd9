"""Workers that go on with what they had before an update of the servers."""

from __future__ import annotations

import torch

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.proof.causes.updates.updates import stale_versions
from echelon.proof.claims.checks import Evidence
from echelon.proof.claims.tolerance import float64_tolerance
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.ranks import ObservedShard, RankResult
from echelon.proof.shrink import shrink
from tests.parallel.servers.test_server import served_plan


def shard(rank: int, name: str, values: torch.Tensor, *, primary: bool) -> ObservedShard:
    """Return a whole parameter as a rank gives it."""
    shape = tuple(values.shape)
    return ObservedShard(
        rank=rank,
        kind="parameters",
        step=0,
        name=name,
        global_shape=shape,
        offset=(0,) * len(shape),
        primary=primary,
        tensor=values,
    )


def evidence_of(plan: Plan, oracle: OracleStep, *, workers: torch.Tensor, name: str) -> Evidence:
    """Return what is seen where a server is right, and workers have these values."""
    right = oracle.after[name]
    results = [
        RankResult(rank=0, reports=(), shards=(shard(0, name, workers, primary=True),)),
        RankResult(rank=1, reports=(), shards=(shard(1, name, right, primary=False),)),
    ]
    observed = ObservedRun(plan, results)
    return Evidence(
        plan=plan,
        reference_plan=plan,
        oracle=(oracle,),
        observed=observed,
        tolerance=float64_tolerance(),
    )


def test_a_stale_version_is_named() -> None:
    """S06: servers have the update, workers the values before."""
    plan = shrink(served_plan(1, 1), precision="fp64")
    (oracle,) = run_oracle(plan, 1)
    name = parameters(plan.model)[0].name

    stale = evidence_of(plan, oracle, workers=oracle.before[name], name=name)
    fresh = evidence_of(plan, oracle, workers=oracle.after[name], name=name)

    (finding,) = stale_versions(stale, oracle, name)
    assert (finding.factor, finding.axis) == ("stale", "servers")
    assert not list(stale_versions(fresh, oracle, name))
