"""Ranks that hear from one another and fail together."""

from __future__ import annotations

import pytest

from echelon.core.errors import CheckpointError
from echelon.core.rulebook.run import CHECKPOINT_EXISTS
from echelon.training.checkpoint.communicator import (
    ObjectCommunicator,
    SingleRankCommunicator,
    run_on_all_ranks,
)
from tests.training.checkpoint.ranks import on_ranks


def missing(what: str) -> CheckpointError:
    return CheckpointError(CHECKPOINT_EXISTS.problem(f"{what} is missing"))


def test_every_rank_has_the_results_of_all() -> None:
    assert run_on_all_ranks(SingleRankCommunicator(), lambda: "alone") == ["alone"]
    found = on_ranks(3, lambda ranks: run_on_all_ranks(ranks, lambda: 10 * ranks.index))
    assert found == [[0, 10, 20]] * 3


def test_what_one_rank_raises_all_of_them_raise() -> None:
    def action(ranks: ObjectCommunicator) -> None:
        if ranks.index == 1:
            raise missing("step-1")

    # `on_ranks` sees that the error is the same on each.
    with pytest.raises(CheckpointError, match="step-1 is missing"):
        on_ranks(3, lambda ranks: run_on_all_ranks(ranks, lambda: action(ranks)))


def test_a_problem_of_several_ranks_is_told_once() -> None:
    def action(ranks: ObjectCommunicator) -> None:
        raise missing("b" if ranks.index == 1 else "a")

    with pytest.raises(CheckpointError) as raised:
        on_ranks(3, lambda ranks: run_on_all_ranks(ranks, lambda: action(ranks)))
    assert len(raised.value.problems) == 2
