"""A wrong norm is told by the part of the gradient that it is the norm of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.norm import explain_norm, norms_of_parts, stage_of
from echelon.proof.claims.checks import Check
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

SPLIT = shrink(layout(tp=2, pp=2, tied=True), precision="fp64")


def told(plan: Plan, norm: Any) -> ProofFinding:
    """Return what is said of a run whose ranks all report this norm."""
    evidence = replicas(plan, report=lambda _, __, record: replace(record, grad_norm=norm))
    return explain_norm(evidence, Check(0, "gradient norm of rank 0", 1.0))


def squares(plan: Plan, *, split: bool | None = None) -> float:
    """Return the sum of squares of the gradients that are cut over `tp`, or that are not."""
    oracle = run_oracle(plan, 1)[0]
    return sum(
        float(oracle.gradients[spec.name].square().sum())
        for spec in parameters(plan.model)
        if split in (None, spec.split_dim is not None)
    )


def test_parts_of_tensor_and_pipeline_ranks_are_named() -> None:
    whole, cut = squares(SPLIT), squares(SPLIT, split=True)
    assert told(SPLIT, cut**0.5).description.split("; ")[0].endswith("of what tensor ranks split")
    twice = told(SPLIT, (2 * whole - cut) ** 0.5)
    assert (twice.factor, twice.axis) == ("partial norm", "tp")
    assert "replicate counted once per rank" in twice.description
    tied = float(run_oracle(SPLIT, 1)[0].gradients["embedding.weight"].square().sum())
    both = told(SPLIT, (whole + tied) ** 0.5)
    assert (both.axis, "on both its stages" in both.description) == ("pp", True)


def test_the_parts_of_stages_and_of_tensor_ranks_add_up() -> None:
    plan = shrink(layout(tp=2, pp=2), precision="fp64")
    found = {one.name: one.value**2 for one in norms_of_parts(plan, run_oracle(plan, 1)[0])}
    stages = [found[f"of pipeline stage {stage} alone"] for stage in (0, 1)]
    assert sum(stages) == pytest.approx(squares(plan), rel=1e-12)
    whole = squares(plan, split=False)
    ranks = [found[f"of tp {rank} alone"] for rank in (0, 1)]
    assert sum(ranks) == pytest.approx(squares(plan) + whole, rel=1e-12)


def test_experts_left_out_or_counted_twice_are_named() -> None:
    plan = shrink(plan_of(model=MIXTRAL, dp_shard=4, ep=2), precision="fp64")
    oracle = run_oracle(plan, 1)[0]
    found = {one.name: one for one in norms_of_parts(plan, oracle)}
    dense, whole = found["without the experts"].value ** 2, oracle.grad_norm**2
    halves = [found[f"of ep {index} alone"].value ** 2 for index in (0, 1)]
    assert dense + sum(halves) == pytest.approx(whole, rel=1e-12)
    twice = found["with experts counted 2 times"]
    assert twice.value**2 == pytest.approx(2 * whole - dense, rel=1e-12)
    assert twice.axis == "edp"


def test_a_factor_is_named_and_rounding_is_rounding() -> None:
    plan = shrink(layout(dp=2), precision="fp64")
    norm = run_oracle(plan, 1)[0].grad_norm
    assert told(plan, norm * 2**0.5).factor == "sqrt(dp)"
    assert told(plan, norm * (1 + 1e-9)).factor == "none"


def test_a_tied_embedding_is_on_two_stages() -> None:
    specs = {spec.name: spec for spec in parameters(SPLIT.model)}
    assert stage_of(SPLIT, specs["embedding.weight"]) == "0 and 1"
    assert stage_of(SPLIT, specs["norm.weight"]) == "1"
    assert stage_of(SPLIT, specs["layers.0.mlp.up.weight"]) == "0"
