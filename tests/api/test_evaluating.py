"""The evaluator hears of the run from the store of the ranks, and ends when they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.api.training import follow_run, run_has_ended
from echelon.core.errors import EnvironmentProblem
from echelon.launch.environment import LaunchedRank
from echelon.launch.launched.rank import ALL_DONE
from tests.training.small_runs import small_job


def test_a_run_has_ended_when_all_ranks_say_so_or_their_store_is_gone() -> None:
    class Gone(HashStore):
        def check(self, _: object) -> bool:
            raise RuntimeError("connection reset")

    store = HashStore()
    assert not run_has_ended(store)
    store.set(ALL_DONE, "1")
    assert run_has_ended(store)
    assert run_has_ended(Gone())


def test_ranks_that_do_not_come_are_told() -> None:
    job = small_job([])
    job = replace(job, train=replace(job.train, step_timeout_s=0.5))
    nobody = LaunchedRank(
        rank=1, local_rank=0, world_size=1, master_addr="127.0.0.1", master_port=9, servers=0
    )
    with pytest.raises(EnvironmentProblem) as caught:
        follow_run(job, nobody, lambda _: None)
    assert caught.value.rules == ("rank-never-joined",)
