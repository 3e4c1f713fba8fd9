"""The weights of microbatches in a sum say what was done to them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from echelon.proof.causes.factors import Factor
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.microbatch_weights import (
    MicrobatchMixture,
    WrongGradientOfPlan,
    explain_weights,
    fit_microbatch_weights,
)
from echelon.proof.oracle.oracle import OracleStep
from tests.proof.layouts import layout

PLAN = layout(dp=4, accumulation=3, zero={}, mesh={"dp_replicate": 2, "dp_shard": 2})
SLOTS = [(replica, microbatch) for replica in range(4) for microbatch in range(3)]
TOKENS = {(r, m): 5 + 7 * r + 3 * m + r * m for r, m in SLOTS}
ORACLE = cast(
    "OracleStep",
    SimpleNamespace(
        microbatch_losses={slot: (1.0, count) for slot, count in TOKENS.items()},
        tokens=sum(TOKENS.values()),
    ),
)


def told(weight: Callable[[int, int], float], before: float = 0.0) -> ProofFinding | None:
    """Return what the weights of a gradient say that data rank 3 holds."""
    mixture = MicrobatchMixture(
        weights={slot: weight(*slot) for slot in SLOTS}, residual=0.0, previous_step=before
    )
    known = [Factor(name="dp", value=4.0, axis="dp")]
    evidence = SimpleNamespace(plan=PLAN)
    gradient = SimpleNamespace(evidence=evidence, step=ORACLE, known=known)
    return explain_weights(mixture, cast("WrongGradientOfPlan", gradient), 3)


@pytest.mark.parametrize(
    ("weight", "factor", "axis", "says"),
    [
        (lambda r, m: 4.0, "dp", "dp", "4 times the right value (dp)"),
        (lambda r, m: float(r == 3), "missing sum", "dp", "the part of dp 3 alone: "),
        (lambda r, m: 2.0 * (r == 3), "missing sum", "dp", "the part of dp 3 alone times 2"),
        (lambda r, m: float(r > 1), "missing sum", "dp_replicate", "parts of dp [2, 3] alone"),
        (lambda r, m: float(r % 2), "missing sum", "dp_shard", "parts of dp [1, 3] alone"),
        (lambda r, m: float(m > 0), "microbatches lost", "microbatches", "microbatches [0]"),
        (lambda r, m: float(r != 1), "replicas lost", "dp", "the parts of dp [1] are lost"),
        (
            lambda r, m: 9 / TOKENS[r, m],
            "mean of means",
            "dp or microbatches",
            "each microbatch of",
        ),
        (
            lambda r, m: 9 / sum(TOKENS[r, other] for other in range(3)),
            "mean of means",
            "dp",
            "each replica counts alike",
        ),
        (lambda r, m: 4.0 if m == 2 else 1.0, "dp", "microbatches", "microbatch 2 counts 4 times"),
        (lambda r, m: 1.0 + r, "replicas weighted", "dp", "dp 0 x 1, dp 1 x 2, dp 2 x 3"),
    ],
)
def test_each_pattern_is_told(
    weight: Callable[[int, int], float], factor: str, axis: str, says: str
) -> None:
    finding = told(weight)
    assert finding is not None
    assert (finding.factor, finding.axis) == (factor, axis)
    assert says in finding.description


def test_the_step_before_and_no_pattern() -> None:
    finding = told(lambda r, m: 1.0, before=0.5)
    assert finding is not None
    assert (finding.factor, finding.value) == ("stale", 0.5)
    assert told(lambda r, m: 1.0 + r * m) is None


def test_weights_are_found_in_the_coarsest_basis_that_explains() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {slot: torch.randn(60, generator=generator, dtype=torch.float64) for slot in SLOTS}
    before = torch.randn(60, generator=generator, dtype=torch.float64)
    right = fit_microbatch_weights(sum(parts.values(), torch.zeros(60)), parts, None)
    assert right is not None
    assert right.right
    for weight in (lambda r, m: 1.0 + r, lambda r, m: 1.0 + m, lambda r, m: 1.0 + r * m):
        mixed = sum((weight(*slot) * part for slot, part in parts.items()), 0.5 * before)
        found = fit_microbatch_weights(mixed, parts, before)
        assert found is not None
        assert not found.right
        assert found.previous_step == pytest.approx(0.5)
        assert found.weights == pytest.approx({slot: weight(*slot) for slot in SLOTS})
    assert fit_microbatch_weights(before, parts, None) is None
    # Of a few elements nothing can be told.
    short = {slot: part[:7] for slot, part in parts.items()}
    assert fit_microbatch_weights(before[:7], short, None) is None
