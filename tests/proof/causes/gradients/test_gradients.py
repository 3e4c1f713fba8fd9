"""What is wrong with a gradient is told by what it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from echelon.proof.causes.gradients.gradients import explain_gradient
from echelon.proof.claims.checks import Check
from echelon.proof.oracle.oracle import contributions, run_oracle
from echelon.proof.ranks import ObservedShard
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import ChangeShard, replicas

PLAN = shrink(layout(dp=2, accumulation=3), precision="fp64")
NAME = "layers.0.mlp.down.weight"


def wrong(change: Callable[[ObservedShard], torch.Tensor], *, step: int = 0) -> ChangeShard:
    def shard(piece: ObservedShard) -> torch.Tensor:
        this = (piece.kind, piece.step, piece.name) == ("gradients", step, NAME)
        return change(piece) if this else piece.tensor

    return shard


@pytest.mark.parametrize(
    ("factor", "named", "axis"),
    [
        (2.0, "dp", "dp"),
        (0.5, "1/dp", "dp"),
        (-1.0, "sign", ""),
        (0.0, "zero", ""),
        (1.7, "number", ""),
        (math.nan, "not finite", ""),
    ],
)
def test_a_clean_factor_is_named(factor: float, named: str, axis: str) -> None:
    evidence = replicas(PLAN, shard=wrong(lambda piece: piece.tensor * factor))
    finding = explain_gradient(evidence, Check(0, NAME, 1.0))
    assert (finding.factor, finding.axis) == (named, axis)
    assert finding.ranks == (0, 1)


def test_rows_of_another_function_are_told_by_their_numbers() -> None:
    def some(piece: ObservedShard) -> torch.Tensor:
        tensor = piece.tensor.clone()
        tensor[2:5] = tensor[2:5].flip(1)
        return tensor

    finding = explain_gradient(replicas(PLAN, shard=wrong(some)), Check(0, NAME, 1.0))
    assert finding.factor == "slice"
    assert finding.description.startswith("in elements 2:5 of dim 0 only: no cause fits")


def test_a_factor_on_one_rank_is_told_with_its_place() -> None:
    change = wrong(lambda piece: piece.tensor * (1.0 if piece.rank == 0 else -1.0))
    finding = explain_gradient(replicas(PLAN, shard=change), Check(0, NAME, 1.0))
    assert (finding.factor, finding.ranks) == ("sign", (1,))
    assert finding.description.startswith("only on dp [1]: ")


def test_copies_that_add_up_were_not_summed() -> None:
    parts = contributions(PLAN, run_oracle(PLAN, 1)[0])

    def own(piece: ObservedShard) -> torch.Tensor:
        return sum(
            (part[NAME] for slot, part in parts.items() if slot[0] == piece.rank),
            torch.zeros_like(piece.tensor),
        )

    finding = explain_gradient(replicas(PLAN, shard=wrong(own)), Check(0, NAME, 1.0))
    assert (finding.factor, finding.axis) == ("missing sum", "dp")


def test_a_sum_that_some_ranks_of_a_group_miss_is_told() -> None:
    plan = shrink(layout(dp=4, accumulation=1), precision="fp64")
    share = torch.linspace(0.1, 0.8, plan.model.hidden, dtype=torch.float64)[:, None]
    shares = {0: share, 1: 1 - share}
    change = wrong(lambda piece: piece.tensor * shares.get(piece.rank, 1.0))
    finding = explain_gradient(replicas(plan, shard=change), Check(0, NAME, 1.0))
    assert (finding.factor, finding.axis, finding.ranks) == ("missing sum", "dp", (0, 1))


def test_a_lost_microbatch_and_a_stale_buffer_are_told() -> None:
    steps = run_oracle(PLAN, 2)
    parts = contributions(PLAN, steps[0])
    lost = parts[0, 1][NAME] + parts[1, 1][NAME]
    evidence = replicas(PLAN, 2, shard=wrong(lambda piece: piece.tensor - lost))
    finding = explain_gradient(evidence, Check(0, NAME, 1.0))
    assert finding.factor == "microbatches lost"
    assert "microbatches [1] are lost" in finding.description
    before = steps[0].gradients[NAME]
    evidence = replicas(PLAN, 2, shard=wrong(lambda piece: piece.tensor + before, step=1))
    finding = explain_gradient(evidence, Check(1, NAME, 1.0))
    assert (finding.factor, finding.value) == ("stale", pytest.approx(1.0))


def test_what_nothing_explains_is_called_so() -> None:
    noise = torch.randn(
        run_oracle(PLAN, 1)[0].gradients[NAME].shape,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    finding = explain_gradient(
        replicas(PLAN, shard=wrong(lambda piece: noise)), Check(0, NAME, 1.0)
    )
    assert finding.factor == "none"
    assert finding.description.startswith(
        "no cause fits; excluded, with the part that each leaves: "
    )
    assert "weights of microbatches and replicas" in finding.description
