"""What is captured from outside: every backward, every update; the program is left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.errors import ConfigError
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.evidence.captured import RankReport
from echelon.proof.verify import capture
from echelon.proof.verify.capture import read_report
from echelon.proof.verify.reference import OneDeviceAnswer
from tests.proof.verify.planted_programs import proof_of, written


def test_what_a_step_returns_is_read() -> None:
    assert read_report(None) == RankReport()
    assert read_report(torch.tensor(2.0)) == RankReport(loss=2.0)
    assert read_report({"loss": 1, "tokens": 3}) == RankReport(loss=1.0, tokens=3.0)
    for wrong in ({"los": 1.0}, "text", torch.zeros(2)):
        with pytest.raises(ConfigError, match="verify-returned"):
            read_report(wrong)


def captured(context: RankContext, argument: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return what was captured, and how many hooks are left: a target of the pool."""
    programs: list[Any] = []
    kept = capture.open_program

    def remember(on_rank: Any, table: Any) -> Any:
        programs.append(on_rank)
        return kept(on_rank, table)

    capture.open_program = remember
    try:
        found = capture.capture_rank(context, argument)
    finally:
        capture.open_program = kept
    model, optimizer = programs[0].model, programs[0].optimizer
    hooks = sum(len(p._backward_hooks or ()) for p in model.parameters())
    hooks += len(optimizer._optimizer_step_pre_hooks)
    return sorted({f"{piece.kind} {piece.call}" for piece in found.pieces}), hooks


def test_hooks_see_every_backward_and_are_taken_off(rank_pool: RankPool, tmp_path: Path) -> None:
    changes = {
        "        loss.backward()": "        (loss / 2).backward(retain_graph=True)\n"
        "        (loss / 2).backward()"
    }
    file = str(written(tmp_path, "ddp", changes))
    argument = {"file": file, "ranks": None}
    target = "echelon.proof.verify.reference:run_one_device"
    answer: OneDeviceAnswer = rank_pool.run(target, argument, 1)[0]
    exact = answer.passes[0].exact
    wanted = {"file": file, "settings": answer.settings, "dtype": "float64"}
    wanted |= {"logical": exact.logical, "initial": exact.initial, "modules": {"0"}}
    for kinds, hooks in rank_pool.run(captured, wanted, 2):
        assert kinds == [
            *("exp_avg 0", "exp_avg_sq 0", "gradients 0", "local 0", "local 1", "parameters 0"),
        ]
        assert hooks == 0


OWN_LOOP = {
    "    return ec.OnRank(model=model, step=step": "    def run():\n"
    "        return [step(number) for number in range(case.num_steps)]\n\n"
    "    return ec.OnRank(model=model, run=run"
}


def test_a_program_may_have_a_loop_of_its_own(rank_pool: RankPool, tmp_path: Path) -> None:
    proof = proof_of(rank_pool, tmp_path, "ddp", OWN_LOOP)
    assert proof.proven, proof.diagnosis
    compared = {claim.rule.id: claim.compared for claim in proof.passes[0].claims}
    assert compared["prove-gradients"] == compared["verify-local-gradients"] == 7 * 3
