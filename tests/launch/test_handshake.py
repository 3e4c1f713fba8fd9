"""Ranks agree at start, or the odd one is named."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.errors import EnvironmentProblem
from echelon.launch import handshake
from echelon.launch.handshake import check_same_start, code_version, disagreements
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from tests.launch import targets

LABELS = ("tp0", "tp1", "tp2", "tp3")
SAME = {"code": "0.1.0+aa", "torch": "2.13.0", "config": "beef"}


@pytest.mark.parametrize(
    ("key", "rule", "said"),
    [
        ("code", "same-code", r"rank 2 \(tp2\) has Echelon odd; 3 ranks: 0.1.0\+aa"),
        ("torch", "same-torch", r"rank 2 \(tp2\) has torch odd; 3 ranks: 2.13.0"),
        ("config", "same-config", r"rank 2 \(tp2\) has a run configuration with hash odd"),
        ("wte", "same-state", r"rank 2 \(tp2\) has wte = odd; 3 ranks: 1234"),
    ],
)
def test_the_odd_rank_is_named(key: str, rule: str, said: str) -> None:
    usual = {**SAME, "wte": "1234"}
    ranks = {rank: {**usual, key: "odd"} if rank == 2 else usual for rank in range(4)}
    (problem,) = disagreements(ranks, LABELS)
    assert problem.rule == rule
    with pytest.raises(EnvironmentProblem, match=said):
        raise EnvironmentProblem(problem)


def test_ranks_are_compared_on_what_they_hold() -> None:
    assert disagreements({0: {"a": "1"}, 1: {"b": "2"}, 2: {"a": "1"}}, LABELS) == ()


def test_two_against_two_is_told_as_such() -> None:
    said = {rank: {"config": "left" if rank < 2 else "right"} for rank in range(4)}
    (problem,) = disagreements(said, LABELS)
    assert "no majority" in problem.message


def test_all_differences_are_told() -> None:
    said = {0: SAME, 1: SAME, 2: {**SAME, "code": "x", "torch": "y"}}
    assert [p.rule for p in disagreements(said, LABELS)] == ["same-code", "same-torch"]


def test_digests_of_replicas_are_compared_over_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(targets.state_digests, None, 4) == ["agreed"] * 4
    with pytest.raises(RankFailure) as caught:
        rank_pool.run(targets.state_digests, 2, 4)
    error = caught.value.error
    assert isinstance(error, EnvironmentProblem)
    assert error.rules == ("same-state",)
    assert "rank 2 (tp2) has wte = other; 3 ranks: same" in str(error)


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(EnvironmentProblem, match=r"rank 1 \(b\) did not join.*1 of 2") as caught:
        check_same_start(store, rank=0, labels=("a", "b"), argument={}, timeout_s=0.3)
    assert caught.value.rules == ("rank-never-joined",)


def test_a_first_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_VERDICT_S", 0.1)
    with pytest.raises(EnvironmentProblem, match=r"rank 0 \(a\) did not join") as caught:
        check_same_start(HashStore(), rank=1, labels=("a", "b"), argument={}, timeout_s=0.2)
    assert caught.value.rules == ("rank-never-joined",)


def test_both_sides_hear_of_another_configuration() -> None:
    store = HashStore()
    errors: dict[int, EnvironmentProblem] = {}

    def join(rank: int) -> None:
        try:
            check_same_start(
                store, rank=rank, labels=("a", "b"), argument={"lr": rank}, timeout_s=10
            )
        except EnvironmentProblem as error:
            errors[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {rank: error.rules for rank, error in errors.items()} == {
        0: ("same-config",),
        1: ("same-config",),
    }


def test_the_code_version_depends_on_the_source_only() -> None:
    assert code_version() == code_version()
    assert code_version().startswith("0.")
