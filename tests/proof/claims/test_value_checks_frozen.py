"""A frozen weight that moved, or has a gradient, fails its claim: prove-frozen."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from echelon.proof.claims.claims import CLAIMS
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.value_checks import frozen
from echelon.proof.evidence.run import INITIAL, ProgramRun


def evidence(*, moved: bool = False, gradient: bool = False) -> PlanEvidence:
    first = torch.ones(2)
    later = first + torch.tensor([0.0, float(moved) * 2.0**-20])
    piece = SimpleNamespace(rank=1, tensor=later, of=lambda whole: whole)

    def shards(kind: str, _step: int, _name: str) -> list[Any]:
        return [piece] * gradient if kind == "gradients" else [piece]

    def whole(_kind: str, step: int, _name: str) -> torch.Tensor:
        assert step == INITIAL
        return first.double()

    specs = {"w": SimpleNamespace(frozen=True), "a": SimpleNamespace(frozen=False)}
    observed: Any = SimpleNamespace(
        specs=specs, value_kinds=("parameters",), parts=shards, whole=whole, fits=lambda _: True
    )
    observed.differing = partial(ProgramRun.differing, observed)
    return cast(PlanEvidence, SimpleNamespace(run=observed, steps=[SimpleNamespace(step=0)]))


def test_what_is_frozen_is_compared_and_nothing_else() -> None:
    found = list(frozen(evidence()))
    assert {one.subject for one in found} == {"w"}
    assert not any(one.error for one in found)
    assert "prove-frozen" in {one.rule.id for one in CLAIMS}


@pytest.mark.parametrize("mistake", ["moved", "gradient"])
def test_a_weight_that_moved_or_has_a_gradient_is_told(mistake: str) -> None:
    failures = [one for one in frozen(evidence(**{mistake: True})) if one.error]
    assert [one.subject for one in failures] == ["w"]
    assert "ranks [1]" in failures[0].detail
