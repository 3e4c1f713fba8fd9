"""A module that was saved under one split goes on under any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.api.parallelizing import parallelize
from echelon.core.errors import CheckpointError
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from tests.parallel.layouts import plan_of
from tests.parallel.module.refusals import refusal
from tests.parallel.module.targets import full
from tests.parallel.module.tensor.families import OWN_RULES, Own, batch, loss_of, make
from tests.parallel.module.tensor.test_layers import LAYOUTS, OPTIMIZER

Given = tuple[str, str, int, int]
"""A layout, the file, the first step and the one after the last."""

WHOLE = {**LAYOUTS, "whole": {}, "zero3": {"dp_shard": 2, "zero": LAYOUTS["tp2 zero3"]["zero"]}}


def steps(context: RankContext, given: Given) -> dict[str, torch.Tensor]:
    """Take steps after what a file has, where there is one; save; return all parameters."""
    layout, file, first, end = given
    plan = plan_of(optimizer=OPTIMIZER, bucket_bytes=4000, **WHOLE[layout])
    model, optimizer = parallelize(make("own"), plan, tensor=OWN_RULES)
    if first:
        optimizer.load(file)
    for step in range(first, end):
        loss_of(model, batch(step, 0)).backward()
        assert optimizer.step().step == step
    optimizer.save(f"{file}.after" if first else file)
    return full(optimizer)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2", "whole"),
        pytest.param("whole", "tp2", marks=pytest.mark.slow),
        pytest.param("tp2 sequence zero3", "zero3", marks=pytest.mark.slow),
        pytest.param("zero3", "tp2 zero3", marks=pytest.mark.slow),
    ],
)
def test_another_split_goes_on(
    rank_pool: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    def run(layout: str, first: int, end: int, name: str) -> dict[str, torch.Tensor]:
        size = plan_of(**WHOLE[layout]).mesh.world_size
        given = (layout, str(tmp_path / name), first, end)
        return rank_pool.run(steps, given, world_size=size, timeout_s=200.0)[0]

    straight = run("whole", 0, 3, "straight.pt")
    run(before, 0, 2, "two.pt")
    resumed = run(after, 2, 3, "two.pt")
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-10, atol=1e-12, msg=name)
    one, other = (torch.load(tmp_path / name) for name in ("straight.pt", "two.pt.after"))
    assert one["progress"] == other["progress"]
    for kind, tensors in one["tensors"].items():
        for name, value in tensors.items():
            mine = other["tensors"][kind][name]
            torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_file_of_another_module_is_refused(tmp_path: Path) -> None:
    _, optimizer = parallelize(torch.nn.Linear(2, 2), plan_of(optimizer=OPTIMIZER))
    optimizer.save(tmp_path / "linear.pt")
    _, other = parallelize(Own(), plan_of(optimizer=OPTIMIZER))
    error = refusal(lambda: other.load(tmp_path / "linear.pt"))
    assert isinstance(error, CheckpointError)
    assert error.rules == ("module-state",)
    assert "tokens.weight is not there" in str(error)
