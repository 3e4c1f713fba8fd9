"""Asynchronous servers: the recorded order, replayed in one process, gives the same parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.errors import ConfigError
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import QWEN
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.test_served import with_updates


@pytest.mark.one_in(2)
@pytest.mark.system("S07")
@pytest.mark.parametrize(
    ("num_workers", "num_servers", "bound", "damping"),
    [(2, 1, 2, 0.0), (2, 2, 1, 1.0), (4, 2, 2, 0.5), (2, 2, 0, 0.0)],
)
def test_an_asynchronous_run_equals_its_replay(
    rank_pool: RankPool, num_workers: int, num_servers: int, bound: int, damping: float
) -> None:
    """S07, A14: float64 to 1e-10, for the versions that were read, with bound and damping."""
    plan = with_updates(served_plan(num_workers, num_servers), bound, damping)

    proof = prove(plan, run_ranks=rank_pool.run)

    proof.require()
    (exact,) = proof.passes
    claims = {claim.rule.id: claim for claim in exact.claims}
    assert claims["prove-replay"].max_error < 1e-10
    assert claims["prove-replayed-loss"].compared == proof.num_steps * num_workers
    assert claims["prove-bytes-sent"].compared == num_workers + num_servers
    assert "staleness" in exact.note


def test_clipping_and_another_optimizer_are_replayed(rank_pool: RankPool) -> None:
    """S07: a tied model, SGD with momentum."""
    plan = with_updates(served_plan(2, 2, model=QWEN), 2, 1.0)
    numbers = plan.mathematics
    sgd = replace(numbers, optimizer=replace(numbers.optimizer, kind="sgd"))
    prove(replace(plan, mathematics=sgd), run_ranks=rank_pool.run).require()


def test_late_completion_has_no_order_to_compare(rank_pool: RankPool) -> None:
    """S07: refused before any rank starts."""
    plan = with_updates(served_plan(2, 1), 1)
    with pytest.raises(ConfigError) as refused:
        prove(plan, run_ranks=rank_pool.run, late=True)
    assert refused.value.rules == ("asynchronous-order-is-not-known",)
