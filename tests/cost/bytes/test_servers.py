"""Bytes of parameter servers: through each go 2 W model / S, and workers hold no state."""

from __future__ import annotations

import pytest

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from echelon.cost.bytes.servers import through_server
from echelon.layout.slots import served_buckets
from tests.parallel.layouts import plan_of
from tests.parallel.servers.test_server import MIXED, served_plan


def model_bytes(plan: Plan) -> int:
    """Return the bytes of all gradients, which are those of all parameters here."""
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    return size * sum(bucket.num_elements for bucket in served_buckets(plan))


@pytest.mark.system("S06")
@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_twice_the_model_of_each_worker_goes_through_the_servers(
    num_workers: int, num_servers: int
) -> None:
    """S06, A13, A15: 2 W model / S through each server."""
    plan = served_plan(num_workers, num_servers)
    model = model_bytes(plan)

    through = [through_server(plan, server) for server in range(num_servers)]

    assert sum(through) == 2 * num_workers * model
    if model % (8 * num_servers) == 0:
        assert set(through) == {2 * num_workers * model // num_servers}
    count, row = 8 * (plan.mesh.world_size - 1), 40 * (plan.mesh.world_size - 1)
    for rank in range(num_workers):
        assert bytes_sent_by_axis(plan, rank) == {"servers": model + count, "world": row}
    for server, rank in enumerate(plan.mesh.server_ranks):
        sent = bytes_sent_by_axis(plan, rank)
        assert sent == {"servers": through[server] // 2 + count, "world": row}


def test_a_worker_sends_no_more_than_a_data_rank_and_all_links_carry_more() -> None:
    """S06: DDP sends 2 (W-1)/W of the model from each rank, a worker all of it once."""
    plan, whole = served_plan(4, 2), plan_of(dp=4)
    model = model_bytes(plan)

    ddp = {term.name: term.bytes for term in bytes_sent(whole, 0) if term.axis == "dp"}
    pushed = {term.name: term.bytes for term in bytes_sent(plan, 0)}

    assert ddp["gradients"] == 2 * 3 * model // 4
    assert pushed["gradients to servers"] == model
    every = sum(bytes_sent_by_axis(plan, rank)["servers"] for rank in range(6))
    assert every - 6 * 5 * 8 == 2 * 4 * model
    assert 4 * ddp["gradients"] == 2 * 3 * model


def test_workers_hold_parameters_and_gradients_only() -> None:
    """S06: optimizer state and masters are on servers, each element once."""
    plan = served_plan(2, 2, precision=MIXED)

    def held(rank: int) -> dict[str, int]:
        return {term.name: term.bytes for term in bytes_held(plan, rank)}

    elements = sum(bucket.num_elements for bucket in served_buckets(plan))
    assert held(0) == held(1) == {"parameters": 2 * elements, "gradients": 4 * elements}
    servers = [held(2), held(3)]
    for name, each in {
        "parameters": 2,
        "gradients": 4,
        "master parameters": 4,
        "optimizer state": 8,
    }.items():
        assert sum(one[name] for one in servers) == each * elements
