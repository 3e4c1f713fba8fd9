"""Whole tensors are compared: gradients, updates, values, copies, and the decision to skip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from echelon.core.parameters import parameters
from echelon.proof.claims import value_checks
from echelon.proof.claims.checks import Check
from echelon.proof.oracle.optimizers import OptimizerState, clip_scale, update
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.ranks import ObservedShard
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import ChangeShard, replicas

PLAN = shrink(layout(dp=2, accumulation=1), precision="fp64")
NAME = "layers.1.attention.q.weight"


def changed(kind: str, step: int, by: float, *, rank: int | None = None) -> ChangeShard:
    """Return what multiplies one tensor."""

    def change(piece: ObservedShard) -> torch.Tensor:
        this = (piece.kind, piece.step, piece.name) == (kind, step, NAME)
        return piece.tensor * by if this and rank in (None, piece.rank) else piece.tensor

    return change


def broken(checks: Iterable[Check]) -> list[Check]:
    return [one for one in checks if not one.error <= one.allowed]


def test_a_gradient_is_told_with_its_error_in_the_order_of_backward() -> None:
    evidence = replicas(PLAN, shard=changed("gradients", 0, 1.25))
    (one,) = broken(value_checks.gradients(evidence))
    assert (one.subject, one.error) == (NAME, pytest.approx(0.25))
    found = {check.subject: check.position for check in value_checks.gradients(evidence)}
    assert found["head.weight"] < found[NAME] < found["embedding.weight"]


def test_a_value_is_wrong_after_the_step_that_updates_it_wrong() -> None:
    evidence = replicas(PLAN, 2, shard=changed("parameters", 0, 1 + 1e-3))
    # The step after it comes back to the right value: its update is wrong, too.
    assert [(one.step, one.subject) for one in broken(value_checks.updates_of_plan(evidence))] == [
        (0, NAME),
        (1, NAME),
    ]
    assert broken(value_checks.parameters(evidence)) == []
    evidence = replicas(PLAN, 2, shard=changed("parameters", 1, 1 + 1e-3))
    (one,) = broken(value_checks.parameters(evidence))
    assert one.error == pytest.approx(1e-3)


def test_copies_hold_the_same_bits() -> None:
    evidence = replicas(PLAN, shard=changed("parameters", 0, 1 + 2e-16, rank=1))
    (one,) = broken(value_checks.replicas(evidence))
    assert (one.subject, one.detail) == (NAME, "ranks [1] differ from the primary holder")
    assert broken(value_checks.updates_of_plan(evidence)) == []


def test_without_master_copies_and_in_float64_nothing_is_replayed() -> None:
    evidence = replicas(PLAN)
    assert list(value_checks.written_back(evidence)) == []
    assert list(value_checks.replayed_updates(evidence)) == []


def test_the_formula_makes_the_updates_of_one_device_of_its_gradients() -> None:
    evidence = replicas(PLAN, 2)
    replayed = value_checks.replay(evidence, torch.float64)
    for oracle in evidence.steps:
        for name, one in oracle.updates.items():
            torch.testing.assert_close(
                replayed[oracle.step][name], one.total, rtol=1e-9, atol=1e-15
            )


def test_muon_may_magnify_the_rounding_of_a_gradient_and_nothing_else() -> None:
    """A direction without a gradient has rounding in it; the update must be that of the ranks'."""
    plan = shrink(layout(dp=2, accumulation=1, optimizer={"kind": "muon"}), precision="fp64")
    (right,) = run_oracle(plan, 1)
    gradient = right.gradients[NAME]
    left, sizes, above = torch.linalg.svd(gradient, full_matrices=False)
    rounding = 1e-7 * sizes[0] * torch.outer(left[:, -1], above[-1])
    clip = clip_scale(right.grad_norm, plan.mathematics.optimizer.clip_norm)
    (spec,) = (one for one in parameters(plan.model) if one.name == NAME)

    def moved(value: torch.Tensor) -> torch.Tensor:
        optimizer, rate = plan.mathematics.optimizer, right.learning_rate
        before = right.before[NAME]
        one = update(spec, before, clip * value, OptimizerState(), optimizer, rate)
        return before + one.total

    def held(value: torch.Tensor, gradient: torch.Tensor) -> list[str]:
        def shard(piece: ObservedShard) -> torch.Tensor:
            if piece.name != NAME or piece.step != 0:
                return piece.tensor
            return gradient if piece.kind == "gradients" else value

        evidence = replicas(plan, shard=shard)
        tolerance = replace(evidence.tolerance, own_precision=True)
        found = broken(value_checks.updates_of_plan(replace(evidence, tolerance=tolerance)))
        return [check.subject for check in found]

    rounded = gradient + rounding
    assert held(moved(gradient), gradient) == []
    assert held(moved(rounded), rounded) == []
    assert held(moved(rounded), gradient) == [NAME]
    assert held(moved(gradient) + 1e-3 * (moved(gradient) - right.before[NAME]), gradient) == [NAME]


def test_a_value_that_moves_little_may_be_rounded_and_no_more() -> None:
    """In float32 a difference of two values is off by half a unit in their last place."""
    plan = shrink(layout(dp=2, accumulation=1), precision="fp64")
    name = "norm.weight"
    (right,) = run_oracle(plan, 1)
    after = right.after[name]

    def held(value: torch.Tensor) -> list[str]:
        evidence = replicas(
            plan,
            shard=lambda piece: (
                value
                if (piece.kind, piece.step, piece.name) == ("parameters", 0, name)
                else piece.tensor
            ),
        )
        own = replace(plan.mathematics.precision, parameters="fp32", master="fp32")
        rough = replace(plan, mathematics=replace(plan.mathematics, precision=own))
        tolerance = replace(evidence.tolerance, own_precision=True)
        told = replace(evidence, plan=rough, tolerance=tolerance)
        return [check.subject for check in broken(value_checks.updates_of_plan(told))]

    assert held(after) == []
    assert held(after.float().double()) == []
    assert held(after * (1.0 + 2.0**-22)) == [name]


def test_who_skips_alone_or_by_another_scale_is_told() -> None:
    evidence = replicas(
        PLAN,
        report=lambda rank, step, record: replace(record, skipped=rank == 1, loss_scale=1.0 + rank),
    )
    first, second = broken(value_checks.loss_scale(evidence))
    assert first.detail == "skipped the step; one device took the step"
    assert (second.subject, second.detail) == ("loss scale of rank 1", "2 instead of 1")
