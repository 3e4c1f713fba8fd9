"""What a planted bug must be told as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from echelon.core.errors import ProofFailed
from echelon.core.plan import Plan
from echelon.launch.local.pool import RankPool
from echelon.proof.run import prove
from tests.proof.layouts import layout


@dataclass(frozen=True, slots=True)
class Planted:
    """Say where a bug is planted and what the prover must say of it; `of` makes the plan."""

    mutant: str
    rule: str
    tensor: str
    factor: str
    axis: str = ""
    step: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    own_precision: bool = False
    of: Callable[..., Plan] = layout


def assert_caught(planted: Planted, rank_pool: RankPool) -> None:
    """Prove a plan whose engine has the bug; the proof must fail, and say what is wrong."""
    proof = prove(
        planted.of(**planted.plan),
        run_ranks=rank_pool.run,
        subject=f"tests.proof.mutants.{planted.mutant}",
        own_precision=planted.own_precision,
    )

    assert not proof.proven
    found = proof.diagnosis
    assert found is not None
    told = (found.rule, found.tensor, found.factor, found.axis, found.step)
    wanted = (planted.rule, planted.tensor, planted.factor, planted.axis, planted.step)
    assert told == wanted, found.sentence()
    with pytest.raises(ProofFailed) as failed:
        proof.require()
    assert planted.rule in failed.value.rules
    assert found.sentence() in str(failed.value)
