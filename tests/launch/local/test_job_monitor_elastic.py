"""A job that goes on without some of its islands: they are dropped, started again, or too few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import DataError
from echelon.launch.local.messages import ElasticRanks
from echelon.launch.local.supervisor import LaunchOptions, RankPool, run_ranks
from echelon.launch.root_cause import FaultKind, RankFailure
from tests.launch import targets

LABELS = ("island0", "island1", "island2")


def elastic(*, least: int = 1, restarts: int = 1) -> ElasticRanks:
    """Return three islands of one rank."""
    return ElasticRanks(num_ranks=3, least=least, restarts=restarts)


def run(pool: RankPool, argument: dict[str, Any], **chosen: Any) -> Any:
    """Run three islands, of which the first hosts the store."""
    target = f"{targets.__name__}:come_and_go"
    return pool.run(target, {"ranks": 3, **argument}, 3, labels=LABELS, elastic=elastic(**chosen))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["kill", "exit", "stop", "raise"])
def test_a_lost_rank_is_dropped_and_started_again(
    rank_pool: RankPool, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    """S07: killed, ended, stopped, or an error that others may not have with other samples."""
    first, back, other = run(rank_pool, {"rank": 1, "how": how, "until": 1, "losses": 1})

    assert (back["attempt"], back["group"]) == (1, 1)
    assert (other["attempt"], other["group"]) == (0, 1)
    ((rank, attempt, cause, returns),) = first["lost"]
    assert (rank, attempt, returns) == (1, 0, True)
    error = capfd.readouterr().err
    assert f"rank 1 (island1): {cause}" in error
    assert "island 1 (rank 1) is left out; the run goes on with 2 of 3 islands" in error
    assert error.rstrip().endswith("it is started again")


def test_a_rank_that_is_lost_again_stays_away(rank_pool: RankPool) -> None:
    """S07: as often as `restarts` says."""
    argument = {"rank": 1, "how": "kill", "times": 9, "losses": 3}
    first, gone, other = run(rank_pool, argument, restarts=2)

    assert gone is None
    assert other["attempt"] == 0
    told = [(rank, attempt, returns) for rank, attempt, _, returns in first["lost"]]
    assert told == [(1, 0, True), (1, 1, True), (1, 2, False)]


def test_a_job_without_enough_ranks_ends_and_names_the_rank(rank_pool: RankPool) -> None:
    """S07: with fewer than the least the first loss ends it, as any loss does."""
    with pytest.raises(RankFailure) as failed:
        run(rank_pool, {"rank": 2, "how": "kill", "losses": 1}, least=3)
    assert (failed.value.rank, failed.value.fault.kind) == (2, FaultKind.KILLED)


def test_our_own_errors_end_the_job(rank_pool: RankPool) -> None:
    """S07: an error that is about the run would come again."""
    with pytest.raises(RankFailure) as failed:
        run(rank_pool, {"rank": 1, "how": "user-error", "losses": 1})
    assert failed.value.rank == 1
    assert isinstance(failed.value.error, DataError)


def test_who_has_not_come_back_when_all_is_done_is_not_waited_for(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """S07: the others have returned; a rank that was started again hangs."""
    monkeypatch.setattr("echelon.launch.local.job_monitor.ENDS_WITHIN_S", 1.0)
    told = {"rank": 1, "how": "kill", "then": "hang", "times": 2, "losses": 1}

    assert run(rank_pool, told)[1] is None
    assert "rank 1 (island1): had not come back when the run ended" in capfd.readouterr().err


def test_the_first_rank_may_be_lost_where_the_launcher_hosts_the_store(tmp_path: Path) -> None:
    """S07: a run of its own; how it ended tells who was lost."""
    options = LaunchOptions(elastic=elastic(), shown_rank=None)
    outcome = run_ranks(
        targets.come_and_go,
        {"ranks": 3, "rank": 0, "how": "kill", "until": 1},
        world_size=3,
        log_dir=tmp_path,
        options=options,
    )

    assert [one["attempt"] for one in outcome.require()] == [1, 0, 0]
    (lost,) = outcome.lost
    assert (lost.rank, lost.attempt, lost.returns) == (0, 0, True)
    assert "SIGKILL" in lost.cause
