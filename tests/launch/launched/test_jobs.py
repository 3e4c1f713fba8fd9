"""Ranks of torchrun run one job after the other, and end together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from echelon.core.errors import EnvironmentProblem
from echelon.launch.launched.jobs import LaunchedPool
from echelon.launch.local.messages import ElasticRanks

ROOT = Path(__file__).parents[3]


def _torchrun(how: str, world: int) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(world), "-m", "tests.launch.launched.jobs_script", how),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    return subprocess.run(
        [*command, str(world)],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_each_job_has_as_many_ranks_as_it_asks_for_and_all_return_the_drive() -> None:
    done = _torchrun("run", 2)
    assert done.returncode == 0, done.stderr
    result = "([(0, 2), (1, 2)], [0.0, 2.0, 2.0], 2)"
    assert sorted(done.stdout.splitlines()) == [f"rank 0: {result}", f"rank 1: {result}"]


@pytest.mark.slow  # test_launched_rank.py has a rank that raises
def test_a_job_that_raises_ends_all_ranks_and_names_its_own() -> None:
    done = _torchrun("raise", 2)
    assert done.returncode == 1
    assert "error[rank-raised]: rank 1: ValueError: the loss of my life" in done.stderr
    assert "rank 0 stops for rank 1: ValueError" in done.stderr


def test_ranks_of_torchrun_are_all_needed() -> None:
    """S07: torchrun ends all of its processes when one fails."""
    pool = LaunchedPool(cast(Any, None))
    islands = ElasticRanks(num_ranks=2, least=1, restarts=0)
    with pytest.raises(EnvironmentProblem) as refused:
        pool.run("tests.launch.targets:add_ranks", elastic=islands)
    assert refused.value.rules == ("lost-islands-need-our-launcher",)
