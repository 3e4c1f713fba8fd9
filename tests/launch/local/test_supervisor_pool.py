"""The pool runs jobs one after another, names who failed, and stays usable."""

from __future__ import annotations

import psutil
import pytest

from echelon.core.errors import ConfigError
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import FaultKind, RankFailure
from tests.launch import targets

LABELS = {2: ("pp0", "pp1"), 4: ("pp0 tp0", "pp0 tp1", "pp1 tp0", "pp1 tp1")}


def still_works(pool: RankPool) -> bool:
    results = pool.run(targets.add_ranks, 2.0, 2)
    return results == [
        {"rank": 0, "world": 2, "total": 2.0},
        {"rank": 1, "world": 2, "total": 2.0},
    ]


@pytest.mark.parametrize("world_size", [1, 4, 2])
def test_each_job_has_a_group_of_its_own(rank_pool: RankPool, world_size: int) -> None:
    results = rank_pool.run("tests.launch.targets:add_ranks", 1.0, world_size)
    total = sum(range(world_size))
    assert results == [
        {"rank": rank, "world": world_size, "total": total} for rank in range(world_size)
    ]


@pytest.mark.system("S51")
@pytest.mark.one_in(8)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("how", "kind", "rule", "said"),
    [
        ("raise", FaultKind.RAISED, "rank-raised", "ValueError: the loss of my life"),
        ("kill", FaultKind.KILLED, "rank-killed", "SIGKILL"),
        ("segfault", FaultKind.KILLED, "rank-killed", "SIGSEGV"),
        ("exit", FaultKind.EXITED, "rank-killed", "exited with code 7"),
        ("sys-exit", FaultKind.RAISED, "rank-raised", "SystemExit"),
        ("stop", FaultKind.STOPPED, "rank-stopped", "is stopped (SIGSTOP)"),
    ],
)
def test_the_rank_that_failed_first_is_named(
    rank_pool: RankPool, world_size: int, how: str, kind: FaultKind, rule: str, said: str
) -> None:
    culprit = world_size - 2
    argument = {"rank": culprit, "how": how}
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(targets.train, argument, world_size, labels=LABELS[world_size])
    failure = caught.value
    assert failure.fault.kind is kind
    assert failure.rules == (rule,)
    assert failure.rank == culprit
    name = f"rank {culprit} ({LABELS[world_size][culprit]}): "
    assert f"error[{rule}]: {name}" in str(failure)
    assert said in str(failure)
    assert still_works(rank_pool)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_stuck_rank_is_named_with_its_stack(rank_pool: RankPool, world_size: int) -> None:
    argument = {"rank": 1, "how": "hang"}
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(targets.train, argument, world_size, timeout_s=1.0)
    assert caught.value.rank == 1
    assert caught.value.rules == ("rank-stuck",)
    assert "last heard of at step 3" in str(caught.value)
    assert "time.sleep(1000)" in str(caught.value)
    assert still_works(rank_pool)


@pytest.mark.slow
def test_a_rank_that_compiles_is_not_stuck(rank_pool: RankPool) -> None:
    """Its time is none of the job's either."""
    rank_pool.run(targets.compile_for_long, 0.0, 2, timeout_s=100.0)  # loads the compiler
    assert rank_pool.run(targets.compile_for_long, 6.0, 2, timeout_s=2.5) == [0, 1]


@pytest.mark.slow
def test_a_timeout_of_others_leads_to_the_rank_they_waited_for(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"time\.sleep\(1000\)") as caught:
        rank_pool.run(targets.impatient, None, 2)
    assert caught.value.rank == 1
    assert caught.value.rules == ("rank-stuck",)


def test_a_circle_of_waits_is_told_as_such(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="neither has any other rank: it waits in recv") as caught:
        rank_pool.run(targets.wait_in_a_circle, None, 2, timeout_s=1.0)
    assert caught.value.rules == ("rank-stuck",)


def test_a_job_that_moves_but_is_too_long_is_told_as_such(rank_pool: RankPool) -> None:
    argument = {"pause": 0.01}
    with pytest.raises(RankFailure, match="did not end in 1 s") as caught:
        rank_pool.run(targets.train, argument, 2, timeout_s=1.0)
    assert caught.value.rules == ("job-timed-out",)


def test_a_busy_rank_is_waited_for(rank_pool: RankPool) -> None:
    assert rank_pool.run(targets.slow, 1.5, 2) == [0, 1]


def test_a_rank_that_is_done_early_leaves_no_gap(rank_pool: RankPool) -> None:
    assert rank_pool.run(targets.leave_early, 0.2, 4) == [0, 1, 2, 3]


def test_a_user_error_keeps_its_problems(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(targets.train, {"rank": 0, "how": "user-error"}, 2)
    assert caught.value.error is not None
    assert caught.value.error.rules == ("broken-file",)


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="pickle"):
        rank_pool.run(targets.unpicklable, None, 2)


def test_a_rank_that_died_between_jobs_is_replaced(rank_pool: RankPool) -> None:
    (pid,) = rank_pool.run(targets.process_id, None, 1)
    rank = psutil.Process(pid)
    rank.kill()
    psutil.wait_procs([rank])
    rank_pool.run(targets.process_id, None, 1)
    assert still_works(rank_pool)


def test_a_job_starts_from_the_defaults_of_torch(rank_pool: RankPool) -> None:
    first = rank_pool.run(targets.change_defaults, None, 2)
    assert rank_pool.run(targets.change_defaults, None, 2) == first


@pytest.mark.parametrize("world_size", [0, 9])
def test_a_world_that_does_not_fit_is_refused(rank_pool: RankPool, world_size: int) -> None:
    with pytest.raises(ValueError, match="in a pool of 8 ranks"):
        rank_pool.run(targets.add_ranks, 1.0, world_size)


@pytest.mark.parametrize("target", ["tests.launch.targets", ":f", lambda context, argument: None])
def test_a_target_without_a_name_is_refused(rank_pool: RankPool, target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rank_pool.run(target)
    assert caught.value.rules == ("target-not-found",)


@pytest.mark.parametrize("target", ["tests.launch.targets:nothing", "tests.launch.nowhere:f"])
def test_a_target_that_is_not_there_is_named(rank_pool: RankPool, target: str) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(target, None, 2)
    assert caught.value.error is not None
    assert caught.value.error.rules == ("target-not-found",)
