"""Factors, weights of microbatches and partial norms are told apart and named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from echelon.core.plan import Plan
from echelon.proof.causes.factors import (
    known_factors,
    name_factor,
    named_factor,
)
from echelon.proof.causes.gradients.microbatch_weights import (
    WrongGradientOfPlan,
    explain_weights,
    fit_microbatch_weights,
)
from echelon.proof.causes.gradients.norm import name_norm, norms_of_parts
from echelon.proof.evidence.fits import fit_basis, fit_factor
from echelon.proof.oracle.oracle import MicrobatchKey, OracleStep, contributions, run_oracle
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.verify.captures import evidence_of

NAME = "layers.0.attention.o.weight"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return shrink(layout(dp=2, tp=4), precision="fp64")


@pytest.fixture(scope="module")
def steps(plan: Plan) -> tuple[OracleStep, ...]:
    return run_oracle(plan, 2)


def gradient_of(plan: Plan, oracle: OracleStep) -> WrongGradientOfPlan:
    """Return all of a wrong gradient that patterns of weights are compared with."""
    known, evidence = known_factors(plan, oracle), SimpleNamespace(plan=plan)
    return cast("WrongGradientOfPlan", SimpleNamespace(evidence=evidence, step=oracle, known=known))


@pytest.mark.parametrize(
    ("value", "name", "axis"),
    [
        (0.0, "zero", ""),
        (-1.0, "sign", ""),
        (4.0, "tp", "tp"),
        (0.25, "1/tp", "tp"),
        (0.5, "1/dp", "dp"),
        (3.0, "microbatches", "microbatches"),
        (1.234, "number", ""),
    ],
)
def test_a_factor_has_a_name(
    plan: Plan, steps: tuple[OracleStep, ...], value: float, name: str, axis: str
) -> None:
    finding = name_factor(value, known_factors(plan, steps[0]))
    # sqrt(tp) = dp here: a number alone cannot tell, and both are said.
    assert (finding.factor, finding.axis.split(" or ")[0]) == (name, axis)


def test_a_number_with_two_meanings_points_to_both(
    plan: Plan, steps: tuple[OracleStep, ...]
) -> None:
    finding = name_factor(2.0, known_factors(plan, steps[0]))
    assert finding.axis == "dp or tp"


def test_a_fit_says_what_it_leaves_unexplained() -> None:
    right = torch.randn(50, dtype=torch.float64)
    assert fit_factor(3 * right, right) == (pytest.approx(3), pytest.approx(0, abs=1e-14))
    _, residual = fit_factor(torch.randn(50, dtype=torch.float64), right)
    assert residual > 0.5
    _, residual = fit_basis(right[:3], [right[:3], right[:3].flip(0)])
    assert residual == float("inf")


PATTERNS: tuple[tuple[Callable[[MicrobatchKey, int, int], float], str, str], ...] = (
    (lambda slot, count, total: 2.0, "dp", "dp or tp"),
    (lambda slot, count, total: total / (6 * count), "mean of means", "dp or microbatches"),
    (lambda slot, count, total: float(slot[0] == 1), "missing sum", "dp"),
    (lambda slot, count, total: float(slot[0] == 0), "replicas lost", "dp"),
    (lambda slot, count, total: float(slot[1] == 2), "microbatches lost", "microbatches"),
    (lambda slot, count, total: float(slot != (0, 1)), "replicas lost", "dp"),
    (lambda slot, count, total: 3.0 if slot[1] == 1 else 1.0, "microbatches", "microbatches"),
    (lambda slot, count, total: 0.3 + slot[0], "replicas weighted", "dp"),
)


@pytest.mark.parametrize(("weight", "factor", "axis"), PATTERNS)
def test_weights_of_microbatches_are_read(
    plan: Plan,
    steps: tuple[OracleStep, ...],
    weight: Callable[[MicrobatchKey, int, int], float],
    factor: str,
    axis: str,
) -> None:
    oracle = steps[1]
    parts = {slot: part[NAME] for slot, part in contributions(plan, oracle).items()}
    counts = {slot: count for slot, (_, count) in oracle.microbatch_losses.items()}
    weights = {slot: weight(slot, counts[slot], oracle.tokens) for slot in parts}
    observed = torch.stack([weights[slot] * parts[slot] for slot in parts]).sum(0)

    mixture = fit_microbatch_weights(observed, parts, steps[0].gradients[NAME])
    assert mixture is not None
    assert not mixture.right
    assert dict(mixture.weights) == pytest.approx(weights, abs=1e-9)
    finding = explain_weights(mixture, gradient_of(plan, oracle), dp_rank=1)
    assert finding is not None
    assert (finding.factor, finding.axis) == (factor, axis)


def test_a_stale_buffer_is_told_from_a_factor(plan: Plan, steps: tuple[OracleStep, ...]) -> None:
    parts = {slot: part[NAME] for slot, part in contributions(plan, steps[1]).items()}
    before = steps[0].gradients[NAME]
    mixture = fit_microbatch_weights(steps[1].gradients[NAME] + 0.5 * before, parts, before)
    assert mixture is not None
    finding = explain_weights(mixture, gradient_of(plan, steps[1]), dp_rank=0)
    assert finding is not None
    assert (finding.factor, finding.value) == ("stale", pytest.approx(0.5))


def test_noise_is_not_a_mixture(plan: Plan, steps: tuple[OracleStep, ...]) -> None:
    parts = {slot: part[NAME] for slot, part in contributions(plan, steps[1]).items()}
    noise = torch.randn(parts[0, 0].shape, dtype=torch.float64)
    assert fit_microbatch_weights(noise, parts, None) is None


def test_norms_of_parts_differ_from_the_norm_and_from_each_other() -> None:
    plan = shrink(layout(pp=2, tp=2, tied=True), precision="fp64")
    oracle = run_oracle(plan, 1)[0]
    parts = norms_of_parts(plan, oracle)
    values = [oracle.grad_norm, *(part.value for part in parts)]
    assert len({round(value, 9) for value in values}) == len(values)
    stages = [part.value for part in parts if part.name.startswith("of pipeline stage")]
    tied = float(oracle.gradients["embedding.weight"].norm())
    assert sum(v**2 for v in stages) == pytest.approx(oracle.grad_norm**2 + tied**2)


def test_a_factor_is_named_by_the_axes_that_have_it() -> None:
    evidence = evidence_of({})
    step = evidence.steps[0]
    assert named_factor(evidence, step, 2.0).factor == "dp"
    assert (named_factor(evidence, step, 0.5).factor, named_factor(evidence, step, 0.5).axis) == (
        "1/dp",
        "dp",
    )
    assert named_factor(evidence, step, 1.7).factor == "number"


def test_a_partial_norm_says_of_what() -> None:
    evidence = evidence_of({})
    step = evidence.steps[0]
    found = name_norm(evidence, step, step.grad_norm * 2**0.5)
    assert found is not None
    assert found.description.startswith(f"{step.grad_norm * 2**0.5:.6g} is the norm of all that")
    assert (found.axis, found.value) == ("dp", pytest.approx(2**0.5))
    assert name_norm(evidence, step, step.grad_norm) is None


def test_where_a_parameter_lies_is_told() -> None:
    assert evidence_of({}).run.place_of("w") == "copies over dp"
    assert evidence_of({}).run.place_of("loss") == ""
