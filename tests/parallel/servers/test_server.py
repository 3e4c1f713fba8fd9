"""Parameter servers equal one process: S06, and A13 and A15 of what the seeds say of servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan, Precision
from echelon.launch.local.supervisor import RankPool
from echelon.layout.slots import served_buckets, server_elements
from echelon.parallel.servers import server_buckets
from echelon.proof.run import prove
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of

MIXED = Precision(parameters="bf16")


def served_plan(num_workers: int, num_servers: int, **changes: Any) -> Plan:
    """Return a plan of so many workers and parameter servers."""
    plan = plan_of(dp=num_workers, **changes)
    mesh = replace(plan.mesh, servers=num_servers)
    return replace(plan, layout=replace(plan.layout, mesh=mesh))


@pytest.mark.system("S06")
@pytest.mark.one_in(8)
@pytest.mark.parametrize(("num_workers", "num_servers"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_synchronous_servers_equal_one_process(
    rank_pool: RankPool, num_workers: int, num_servers: int
) -> None:
    """S06: float64 to 1e-10, bytes sent and held to the byte, for S = 1, 2 and W = 2, 4."""
    proof = prove(served_plan(num_workers, num_servers), run_ranks=rank_pool.run)

    proof.require()
    (exact,) = proof.passes
    assert max(claim.max_error for claim in exact.claims) < 1e-10
    claims = {claim.rule.id: claim for claim in exact.claims}
    ranks = num_workers + num_servers
    assert claims["prove-bytes-sent"].compared >= 2 * ranks
    assert claims["prove-bytes-held"].compared >= 2 * ranks
    assert claims["prove-gradient-norm"].compared % ranks == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": QWEN, "precision": MIXED}, id="tied, masters in float32"),
        pytest.param({"model": GPT2, "optimizer": {"kind": "sgd"}}, id="sgd"),
        pytest.param({"model": NANO, "optimizer": {"clip_norm": None}}, id="not clipped"),
        pytest.param(
            {
                "precision": Precision(
                    parameters="fp16", gradients="fp16", reduction="fp16", loss_scaling="dynamic"
                )
            },
            id="skipped steps",
        ),
    ],
)
def test_servers_are_proven_with_late_completion(
    rank_pool: RankPool, changes: dict[str, Any]
) -> None:
    """S06: with masters, other optimizers and overflows, and whatever completes when."""
    over = changes.pop("optimizer", None) if isinstance(changes.get("optimizer"), dict) else None
    plan = served_plan(2, 2, **changes)
    if over is not None:
        numbers = plan.mathematics
        numbers = replace(numbers, optimizer=replace(numbers.optimizer, **over))
        plan = replace(plan, mathematics=numbers)
    prove(plan, run_ranks=rank_pool.run, late=True).require()


def test_a_server_has_memory_for_its_ranges_only() -> None:
    """S06: values and gradients of ranges; the whole is one element that stands for all."""
    plan = served_plan(2, 2)
    for server in range(2):
        buckets = server_buckets(plan, server, torch.device("cpu"))
        held = [one.value_slice.numel() for one in buckets]
        assert sum(held) == server_elements(plan, server)
        assert [one.gradient_slice.numel() for one in buckets] == held
        assert [one.plan for one in buckets] == [*served_buckets(plan)]
        assert all(one.values.untyped_storage().nbytes() == 8 for one in buckets)
