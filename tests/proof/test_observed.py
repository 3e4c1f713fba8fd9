"""What ranks said, put together: whole tensors, what covers them, and losses of context ranks."""

from __future__ import annotations

import torch

from echelon.proof.observed import ObservedRun
from echelon.proof.ranks import ObservedShard, RankResult
from echelon.proof.subject import StepRecord
from tests.proof.layouts import layout

NAME = "norm.weight"


def piece(rank: int, start: int, values: list[float], *, primary: bool = True) -> ObservedShard:
    return ObservedShard(
        rank=rank,
        kind="parameters",
        step=0,
        name=NAME,
        global_shape=ObservedRun(layout(), ()).specs[NAME].shape,
        offset=(start,),
        primary=primary,
        tensor=torch.tensor(values),
    )


def observed(*pieces: ObservedShard) -> ObservedRun:
    return ObservedRun(layout(), [RankResult(rank=0, reports=(), shards=pieces)])


def test_a_tensor_is_put_together_from_its_primary_pieces() -> None:
    size = observed().specs[NAME].shape[0]
    half = size // 2
    run = observed(
        piece(0, 0, [1.0] * half),
        piece(1, half, [2.0] * (size - half)),
        piece(1, 0, [9.0] * half, primary=False),
    )
    whole = run.whole("parameters", 0, NAME)
    assert whole.dtype == torch.float64
    assert whole.tolist() == [1.0] * half + [2.0] * (size - half)
    assert run.coverage_problem("parameters", 0, NAME) == ""
    assert run.names("parameters", 0) == {NAME}
    assert not run.has_masters


def test_what_no_rank_or_several_hold_is_told() -> None:
    size = observed().specs[NAME].shape[0]
    lacking = observed(piece(0, 0, [1.0]))
    assert lacking.coverage_problem("parameters", 0, NAME) == (
        f"{size - 1} of {size} elements have no primary holder"
    )
    assert torch.isnan(lacking.whole("parameters", 0, NAME)[1:]).all()
    twice = observed(piece(0, 0, [1.0] * size), piece(1, 0, [1.0]))
    assert "1 of" in twice.coverage_problem("parameters", 0, NAME)
    assert "more than one" in twice.coverage_problem("parameters", 0, NAME)
    beyond = observed(piece(3, size - 1, [1.0, 2.0]))
    assert beyond.coverage_problem("parameters", 0, NAME).startswith("rank 3 gives (2,)")


def test_losses_of_context_ranks_add_up() -> None:
    plan = layout(mesh={"cp": 2}, context={"kind": "ring"})

    def said(losses: dict[tuple[int, int], tuple[float, int]]) -> tuple[StepRecord, ...]:
        record = StepRecord(
            loss=1.0, tokens=5, grad_norm=1.0, microbatch_losses=losses, samples=(), layers=()
        )
        return (record,)

    results = [
        RankResult(rank=0, reports=said({(0, 0): (1.5, 3)}), shards=()),
        RankResult(rank=1, reports=said({(0, 0): (2.0, 2), (0, 1): (4.0, 1)}), shards=()),
    ]
    losses = ObservedRun(plan, results).microbatch_losses(0)
    assert losses == {(0, 0): [(3.5, 5)], (0, 1): [(4.0, 1)]}
