"""Digits of sums; factors are fitted in low precision only."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.systematic import digits, fits, sum_dtypes, systematic_errors
from echelon.proof.claims.tolerance import own_tolerance
from echelon.proof.oracle.oracle import run_oracle, step_from_values
from echelon.proof.ranks import ObservedActivation, ObservedShard
from echelon.proof.shrink import shrink
from tests.proof.layouts import BF16, layout
from tests.proof.replicas import replicas


def test_digits_are_those_that_a_number_needs() -> None:
    x = torch.tensor([0.0, 1.0, -1.5, 3.0, 1 + 2**-23, 0.75 * 2**40])
    assert digits(x).tolist() == [1.0, 2.0, 2.0, 24.0, 2.0]
    rounded = torch.randn(1000).bfloat16().float()
    assert float(digits(rounded).max()) <= 8
    assert float(digits(torch.randn(1000)).mean()) > 22


def test_one_device_beside_itself_has_no_factor_and_a_gradient_of_few_digits_is_found() -> None:
    plan = shrink(layout(precision=BF16))
    exact = run_oracle(shrink(layout(precision=BF16), precision="fp64"), 1)
    rough = run_oracle(plan, 1)
    right = replicas(plan)
    tolerance = own_tolerance(plan, exact, [rough], has_masters=False)
    evidence = replace(right, steps=exact, rounded=[rough], tolerance=tolerance)
    assert {check.error for check in systematic_errors(evidence)} == {0.0}
    assert {check.error for check in sum_dtypes(evidence)} == {0.0}
    assert len(list(fits(evidence))) > 20
    few = {name: value.bfloat16().float() for name, value in rough[0].gradients.items()}
    coarse = replicas(
        plan, shard=lambda piece: few[piece.name] if "grad" in piece.kind else piece.tensor
    )
    found = list(sum_dtypes(replace(evidence, run=coarse.run)))
    assert found
    assert all(check.error > check.allowed for check in found)


def test_gradients_of_scores_are_left_out_where_documents_are_separate() -> None:
    """Many a token attends to itself alone: digits there are those of roundings."""
    plan = shrink(layout(precision=BF16, documents="separate"))
    exact = run_oracle(shrink(layout(precision=BF16, documents="separate"), precision="fp64"), 1)
    rough = run_oracle(plan, 1)
    tolerance = own_tolerance(plan, exact, [rough], has_masters=False)
    evidence = replace(replicas(plan), steps=exact, rounded=[rough], tolerance=tolerance)
    subjects = {check.subject for check in sum_dtypes(evidence)}
    assert "layers.0.attention.o.weight" in subjects
    assert "layers.0.mlp.down.weight" in subjects
    assert not subjects & {f"layers.0.attention.{one}.weight" for one in "qk"}


def test_later_steps_begin_with_the_weights_that_the_ranks_have() -> None:
    plan = shrink(layout(precision=BF16))
    reference = shrink(layout(precision=BF16), precision="fp64")
    rough = run_oracle(plan, 2)
    # Weights that are elsewhere by rounding: of one device whose gradients are rounded otherwise.
    other = run_oracle(plan, 2, factor=2**0.5)
    moved = step_from_values(plan, rough[1], other[0].after)
    assert moved.gradients["head.weight"].ne(rough[1].gradients["head.weight"]).any()

    def held(factor: float) -> PlanEvidence:
        """Return the evidence of ranks that go on with the other weights."""

        def shard(piece: ObservedShard) -> torch.Tensor:
            if piece.kind == "parameters":
                return other[max(0, piece.step)].after[piece.name]
            larger = factor if (piece.step, piece.name) == (1, "norm.weight") else 1.0
            return larger * (moved if piece.step else rough[0]).gradients[piece.name]

        def activation(one: ObservedActivation) -> ObservedActivation:
            step = moved if one.step else rough[0]
            of = step.activation_gradients if one.gradient else step.activations
            return replace(one, values_nW=of[one.name].flatten(0, 1))

        exact = run_oracle(reference, 2)
        return replace(
            replicas(plan, 2, shard=shard, activation=activation),
            steps=exact,
            rounded=[rough, other],
            tolerance=own_tolerance(plan, exact, [rough, other], has_masters=False),
        )

    assert {check.error for check in systematic_errors(held(1.0)) if check.step} == {0.0}
    wrong = [check for check in systematic_errors(held(1.1)) if check.error > check.allowed]
    assert [(check.step, check.subject) for check in wrong] == [(1, "norm.weight")]


def test_in_float64_nothing_is_fitted() -> None:
    evidence = replicas(shrink(layout(), precision="fp64"))
    assert not list(systematic_errors(evidence))
    assert not list(sum_dtypes(evidence))
