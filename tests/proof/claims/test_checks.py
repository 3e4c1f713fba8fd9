"""What ranks say is compared with one device: coverage, samples, blocks, counts, losses, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.proof.claims import checks, value_checks
from echelon.proof.claims.checks import Check, dp_rank_of, relative_error, tensor_error
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.run import INITIAL
from echelon.proof.shrink import shrink
from echelon.proof.subject import StepRecord
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(dp=2, accumulation=1), precision="fp64")

Checks = Callable[[PlanEvidence], Iterator[Check]]


def broken(compare: Checks, evidence: PlanEvidence) -> list[Check]:
    return [one for one in compare(evidence) if not one.error <= one.allowed]


def saying(**changes: Any) -> PlanEvidence:
    """Return a run whose rank 1 reports something else."""

    def report(rank: int, step: int, record: StepRecord) -> StepRecord:
        return replace(record, **changes) if rank else record

    return replicas(PLAN, report=report)


def test_errors_are_relative_to_the_norm_or_its_floor() -> None:
    oracle = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), oracle, 1.0) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, 4.5]), oracle, 50.0) == pytest.approx(0.01)
    zero = torch.zeros(2)
    assert relative_error(zero, zero, 0.0) == 0.0
    assert relative_error(oracle, zero, 0.0) == math.inf


def test_what_is_right_passes_everywhere() -> None:
    evidence = replicas(PLAN)
    every: tuple[Checks, ...] = (
        checks.nothing_dropped,
        checks.initial_weights,
        checks.token_count,
        checks.microbatch_losses,
        checks.losses,
        value_checks.gradient_norms,
    )
    for compare in every:
        assert broken(compare, evidence) == []
        assert list(compare(evidence))


def test_samples_of_another_replica_and_blocks_that_nobody_ran_are_told() -> None:
    first = replicas(PLAN).run.reports(0)[0].samples
    (one,) = broken(checks.nothing_dropped, saying(samples=first))
    assert one.detail == "rank 1 is dp 1 but read the samples of dp 0"
    (one,) = broken(checks.nothing_dropped, saying(samples=()))
    assert one.detail.endswith("read the samples of no replica")
    (one,) = broken(checks.nothing_dropped, saying(layers=(1,)))
    assert (one.subject, one.detail) == ("layers.0", "none of ranks [1] ran block 0")


def test_pieces_must_fit_and_be_held() -> None:
    name = "norm.weight"
    cut = replicas(PLAN, shard=lambda p: p.tensor[1:] if p.name == name else p.tensor)
    found = broken(checks.nothing_dropped, cut)
    assert [(one.step, one.subject) for one in found] == [(INITIAL, name), (0, name), (0, name)]
    assert all("1 of" in one.detail for one in found)
    # What is missing is no number, so no error of it can pass.
    error = tensor_error(cut.run, "gradients", 0, name, cut.steps[0].gradients[name])
    assert math.isnan(error) or error == math.inf


def test_the_first_weights_are_compared_bit_for_bit() -> None:
    name = "layers.0.mlp.up.weight"

    def nudged(piece: Any) -> torch.Tensor:
        wrong = piece.rank == 1 and piece.name == name and piece.step == INITIAL
        return torch.nextafter(piece.tensor, piece.tensor + 1) if wrong else piece.tensor

    (one,) = broken(checks.initial_weights, replicas(PLAN, shard=nudged))
    assert (one.subject, one.step) == (name, INITIAL)


def test_counts_and_losses_are_told_with_both_numbers() -> None:
    right = replicas(PLAN).steps[0]
    (one,) = broken(checks.token_count, saying(tokens=right.tokens + 1))
    assert one.detail == f"{right.tokens + 1} instead of {right.tokens}"
    total, count = right.microbatch_losses[1, 0]
    (one,) = broken(checks.microbatch_losses, saying(microbatch_losses={(1, 0): (total, 1)}))
    assert one.detail == f"1 valid tokens instead of {count}"
    (one,) = broken(checks.microbatch_losses, saying(microbatch_losses={}))
    assert (one.detail, one.error) == ("nobody has it", math.inf)
    wrong = saying(microbatch_losses={(1, 0): (math.nan, count)})
    assert len(broken(checks.microbatch_losses, wrong)) == 1
    (one,) = broken(checks.losses, saying(loss=right.loss * 1.5))
    assert one.error == pytest.approx(0.5)
    assert (one.subject, one.position) == ("loss of rank 1", 1)
    assert broken(value_checks.gradient_norms, saying(grad_norm=math.nan))


def test_replicas_are_counted_over_the_replicas_of_shards() -> None:
    plan = layout(dp=4, tp=2, zero={"stage": 2}, mesh={"dp_replicate": 2, "dp_shard": 2})
    assert [dp_rank_of(plan, rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
