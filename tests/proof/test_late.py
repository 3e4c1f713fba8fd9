"""A proof with late completion: who can be asked, what holds, and what ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, ProofFailed, RunFailed
from echelon.core.rulebook.launch import RANK_STUCK
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.completion.in_flight import Race, RaceKind
from echelon.proof.late import LateRun, require_late_subject, run_late
from echelon.proof.ranks import find_factory, race_file
from echelon.proof.run import prove
from tests.proof.layouts import layout
from tests.proof.run.test_run import no_ranks

RACE = Race(
    kind=RaceKind.USED,
    operation="all_gather parameters.bucket1",
    axis="dp_shard",
    step=0,
    rank=1,
    at="",
    says="its result is used by mm",
    when_s=1.0,
)


def test_a_right_engine_gives_the_same_bits_late(rank_pool: RankPool) -> None:
    zero = {"stage": 3, "optimizer_offload": "nvme", "parameter_offload": "nvme"}
    proof = prove(
        layout(dp=2, accumulation=1, zero=zero),
        run_ranks=rank_pool.run,
        own_precision=False,
        late=True,
    )
    proof.require()
    (only,) = proof.passes
    held = {claim.rule.id: claim.compared for claim in only.claims}
    assert held["prove-awaited"] == held["prove-in-flight"] == held["prove-freed"] == 2
    assert held["prove-late"] > held["prove-gradients"]


def test_without_late_completion_nothing_is_said_of_it(rank_pool: RankPool) -> None:
    proof = prove(layout(dp=2, accumulation=1), run_ranks=rank_pool.run, own_precision=False)
    rules = {claim.rule.id for one in proof.passes for claim in one.claims}
    assert not rules & {"prove-awaited", "prove-in-flight", "prove-freed", "prove-late"}


def test_a_subject_that_takes_no_policy_is_refused_before_any_rank() -> None:
    with pytest.raises(ConfigError) as refused:
        prove(layout(), run_ranks=no_ranks, subject="tests.proof.toy:Toy", late=True)
    assert refused.value.rules == ("prove-late-subject",)
    assert "takes 2 arguments" in str(refused.value)
    ours = "echelon.training.subject:build"
    require_late_subject(ours, find_factory(ours))


def _failed(directory: Path) -> None:
    raise RunFailed(RANK_STUCK.problem("rank 0 is stuck"))


def test_what_ends_a_run_after_a_race_is_that_race(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        race_file(directory, 1, 1).write_text(RACE.to_json() + "\n")
        _failed(directory)

    plans = [layout(dp=2), layout(dp=2)]
    found = run_late(fail, plans, tmp_path / "late")
    assert found == [
        LateRun(races=(), num_operations=(), observed=None),
        LateRun(races=(RACE,), num_operations=(), observed=None),
    ]


def test_what_ends_a_run_without_a_race_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as failed:
        run_late(_failed, [layout(dp=2)], tmp_path / "late")
    assert failed.value.rules == ("rank-stuck",)


def test_a_run_that_a_race_ends_is_a_failed_proof(tmp_path: Path) -> None:
    def fail(target: str, argument: object, world_size: int, /, **_: object) -> None:
        assert isinstance(argument, dict)
        assert argument["late"], "the other run may hang on the race"
        race_file(Path(argument["directory"]), 0, 1).write_text(RACE.to_json() + "\n")
        _failed(tmp_path)

    proof = prove(layout(dp=2), run_ranks=fail, late=True)

    assert not proof.proven
    (only,) = proof.passes
    assert [claim.rule.id for claim in only.claims] == ["prove-awaited"]
    assert proof.diagnosis is not None
    assert (proof.diagnosis.tensor, proof.diagnosis.axis) == (RACE.operation, "dp_shard")
    with pytest.raises(ProofFailed) as failed:
        proof.require()
    assert failed.value.rules == ("prove-awaited",)
