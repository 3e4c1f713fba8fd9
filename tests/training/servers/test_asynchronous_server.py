"""A bound of 0 is the synchronous update, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from echelon.core.plan import DType, Plan, Precision
from echelon.launch.local.supervisor import RankPool
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.targets import final_parameters
from tests.training.servers.test_served import with_updates

_TARGET = f"{final_parameters.__module__}:final_parameters"


@pytest.mark.quick("2-2-fp32")
@pytest.mark.system("S07")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_workers", "num_servers"), [(2, 2), (4, 2)])
def test_a_bound_of_zero_gives_the_bits_of_synchronous_servers(
    rank_pool: RankPool, num_workers: int, num_servers: int, dtype: DType
) -> None:
    """S07, A14: staleness 0 reproduces synchronous servers, on every rank."""
    precision = Precision(parameters=dtype)
    plan = served_plan(num_workers, num_servers, precision=precision)
    labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]

    def run(one: Plan) -> object:
        told = {"plan": one.to_json(), "steps": 3}
        return rank_pool.run(_TARGET, told, plan.mesh.world_size, labels=labels)

    synchronous, bound = run(plan), run(with_updates(plan, 0))

    assert isinstance(synchronous, Sequence)
    assert isinstance(bound, Sequence)
    for one, other in zip(synchronous, bound, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            for (at, values), (where, others) in zip(one[name], other[name], strict=True):
                assert at == where
                assert torch.equal(values, others), name
