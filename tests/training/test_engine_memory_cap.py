"""A model whose states exceed the memory of a rank trains in slices that rest in files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan, Zero
from echelon.cost.bytes.held import bytes_held
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from tests.parallel.layouts import NANO, plan_of
from tests.training.memory_targets import train_capped

MIB = 2**20
CAP = 400 * MIB
LARGE = replace(NANO, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1536, layers=10, vocab=997)


def plan_with(zero: Zero, **mesh: Any) -> Plan:
    """Return a plan of the large model on two ranks."""
    return plan_of(model=LARGE, dtype="fp32", microbatches=1, zero=zero, bucket_bytes=MIB, **mesh)


def state_bytes(plan: Plan) -> int:
    """Return the bytes of model state of rank 0, wherever they rest."""
    return sum(term.bytes for term in bytes_held(plan, 0))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers all memory on Linux only")
def test_stage_3_with_files_trains_where_stage_0_does_not_fit(tmp_path: Path) -> None:
    whole = plan_with(Zero(), dp=2)
    assert num_parameters(LARGE) * 16 == state_bytes(whole) > 1.25 * CAP
    files = Zero(
        stage=3,
        accumulate="slices",
        optimizer_offload="nvme",
        parameter_offload="nvme",
        offload_dir=str(tmp_path),
    )
    with RankPool(2) as pool:
        losses = pool.run(train_capped, (plan_with(files, dp_shard=2), CAP, 3), world_size=2)
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
    assert not list(tmp_path.iterdir())
    with RankPool(2) as pool, pytest.raises(RankFailure, match=r"rank [01]: .*memory"):
        pool.run(train_capped, (whole, CAP, 3), world_size=2)
