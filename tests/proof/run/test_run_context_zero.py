"""Context ranks share out state as data ranks do: every ZeRO stage over dp_shard x cp is proven."""

from __future__ import annotations

import pytest

from echelon.core.plan import ContextKind, ZeroStage
from echelon.cost.bytes.held import bytes_held
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.proof.layouts import Changes, layout

CASES: tuple[tuple[ZeroStage, Changes, ContextKind], ...] = (
    (1, {"cp": 4}, "ring"),
    (1, {"cp": 2, "dp_shard": 2}, "gathered"),
    (2, {"cp": 2, "dp_shard": 2}, "ring"),
    (2, {"cp": 2, "dp_replicate": 2}, "striped"),
    (3, {"cp": 4}, "ulysses"),
    (3, {"cp": 2, "dp_shard": 2}, "ulysses-ring"),
)


@pytest.mark.system("S22", "S23", "S33", "S39")
@pytest.mark.quick("1-mesh1-gathered", "3-mesh5-ulysses-ring")
@pytest.mark.parametrize(("stage", "mesh", "kind"), CASES)
def test_every_stage_over_data_and_context_ranks_is_proven(
    stage: ZeroStage, mesh: Changes, kind: ContextKind, rank_pool: RankPool
) -> None:
    context = {"kind": kind, "ulysses_degree": mesh["cp"] if kind.startswith("ulysses") else 1}
    plan = layout(mesh=mesh, context=context, zero={"stage": stage})
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert all(claim.compared > 0 for one in proof.passes for claim in one.claims)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_slice_is_as_small_as_over_as_many_data_ranks(stage: ZeroStage) -> None:
    def held(mesh: Changes) -> dict[str, int]:
        plan = layout(mesh=mesh, zero={"stage": stage, "accumulate": "slices"})
        names = {1: "optimizer", 2: "gradient", 3: "parameter"}
        terms = {term.name: term.bytes for term in bytes_held(plan, 0)}
        return {name: count for name, count in terms.items() if names[stage] in name}

    assert held({"cp": 2, "dp_shard": 2}) == held({"dp_shard": 4})
    assert held({"cp": 2, "dp_shard": 2}) != held({"dp_shard": 2})
