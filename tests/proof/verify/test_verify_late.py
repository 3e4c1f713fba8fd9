"""Asynchronous calls of a plain program complete late: a wait that comes too late is a race."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.proof.verdict import SubjectProof
from echelon.proof.verify.verify import SubjectRanks, verify_subject
from tests.proof.verify.planted_programs import written

WAIT = "            work.wait()\n"
UPDATE = "        optimizer.step()\n"
MESSAGE = "        message.wait()\n"


def late_proof(
    pool: RankPool, folder: Path, name: str, changes: Mapping[str, str] | None = None
) -> SubjectProof:
    ranks = SubjectRanks(run=pool.run, fresh=lambda: None)
    return verify_subject(written(folder, name, changes), ranks, given={"late": True})


def test_a_program_that_waits_in_time_is_proven(rank_pool: RankPool, tmp_path: Path) -> None:
    proof = late_proof(rank_pool, tmp_path, "overlapped")
    assert proof.proven, proof.diagnosis
    (awaited,) = [claim for claim in proof.passes[0].claims if claim.rule.id == "prove-awaited"]
    assert awaited.note == f"{2 * 3 * 13} operations"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["fsdp2", "pipeline"])
def test_calls_of_wrappers_are_left_alone(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    proof = late_proof(rank_pool, tmp_path, name)
    assert proof.proven, proof.diagnosis


BUGS = {
    "the update comes before the wait": (
        {
            UPDATE: "",
            WAIT: "            late.append(work)\n",
            "        works.clear()\n": "        works.clear()\n        optimizer.step()\n"
            "        [work.wait() for work in late]\n        late.clear()\n",
            "    works = []\n": "    works, late = [], []\n",
        },
        ("prove-awaited", "all_reduce gradient of ", "used before it was awaited"),
        "overlapped.py",
    ),
    "gradients are scaled in flight": (
        {
            "        loss.backward()\n": "        loss.backward()\n"
            "        model.head.weight.grad.zero_()\n"
        },
        ("prove-in-flight", "all_reduce gradient of head.weight", "changed in flight"),
        "overlapped.py",
    ),
    "a message is read before it is there": (
        {MESSAGE: "        ahead += 1\n        message.wait()\n"},
        ("prove-awaited", "irecv []", "used before it was awaited"),
        "overlapped.py",
    ),
    "nobody waits for a message": (
        {MESSAGE: ""},
        ("prove-awaited", "[]", "never awaited"),
        "overlapped.py",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bug", BUGS)
def test_a_wait_that_is_late_is_named(bug: str, rank_pool: RankPool, tmp_path: Path) -> None:
    changes, (rule, tensor, factor), place = BUGS[bug]
    diagnosis = late_proof(rank_pool, tmp_path, "overlapped", changes).diagnosis
    assert diagnosis is not None
    assert (diagnosis.rule, diagnosis.factor) == (rule, factor), diagnosis.says
    assert tensor in diagnosis.tensor
    assert place in diagnosis.where
