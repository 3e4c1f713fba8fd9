"""Rows sorted by expert and added up by token: what is dispatched comes back where it was."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from echelon.core.event import EventList
from echelon.core.experts import ExpertLayout
from echelon.core.model_shape import Experts
from echelon.layout.expert_load import (
    RowCounts,
    balanced_pairs,
    balanced_rows,
    even_pairs,
    kept_assignments,
)
from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.expert.token_dispatcher import (
    FlatTokenDispatcher,
    SortedAssignments,
    Transfer,
    even_counts,
    start_both,
)
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.layouts import MIXTRAL, plan_of

CHOSEN_nK = torch.tensor([[2, 0], [1, 2], [0, 2]])


def routed(kept: list[list[bool]] | None = None) -> TokenRouting:
    return TokenRouting(
        gates_nK=torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
        chosen_nK=CHOSEN_nK,
        kept_nK=None if kept is None else torch.tensor(kept),
    )


def test_assignments_lie_by_expert_in_the_order_of_the_tokens() -> None:
    one = SortedAssignments(routed(), 4)
    assert one.counts().tolist() == [2, 1, 3, 0]
    one.keep(6)
    assert one.slot_S.tolist() == [1, 4, 2, 0, 3, 5]
    assert one.token_S.tolist() == [0, 2, 1, 0, 1, 2]


def test_what_is_dropped_is_in_no_row() -> None:
    one = SortedAssignments(routed([[True, False], [False, False], [True, True]]), 4)
    assert one.counts().tolist() == [1, 0, 2, 0]
    one.keep(3)
    assert one.slot_S.tolist() == [4, 0, 5]
    rows_SD = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert one.add_up(rows_SD).tolist() == [[2.0, 20.0], [0.0, 0.0], [5.0, 50.0]]
    nothing = SortedAssignments(routed([[False, False]] * 3), 4)
    nothing.keep(0)
    assert nothing.add_up(torch.zeros(0, 2)).tolist() == [[0.0, 0.0]] * 3


def test_rows_and_gates_come_back_to_their_tokens() -> None:
    group = Group("ep", [0], 0, None, Recorder(0, EventList()))
    dispatcher = FlatTokenDispatcher(routed(), 4, group)
    assert list(dispatcher.rows_by_expert) == [2, 1, 3, 0]
    x_nD = torch.tensor([[1.0], [2.0], [3.0]])
    rows_RD, gates_R = dispatcher.dispatch(x_nD, routed().gates_nK, name="there")()
    assert rows_RD.flatten().tolist() == [1, 3, 2, 1, 2, 3]
    assert gates_R is not None
    back_nD, back_nK = dispatcher.combine(rows_RD, gates_R, name="back")()
    assert torch.equal(back_nD, 2 * x_nD)
    assert back_nK is not None
    assert torch.equal(back_nK, routed().gates_nK)


def test_rows_and_gates_set_out_together_and_are_arranged_when_both_are_there() -> None:
    told: list[str] = []

    def start(rows: torch.Tensor, name: str) -> Transfer:
        told.append(f"start {name}")

        def arrange() -> torch.Tensor:
            told.append(f"arrange {name}")
            return rows + 1

        return arrange, Pending(None, lambda waited: told.append(f"wait {name}"))

    arrive = start_both(start, torch.zeros(1), torch.ones(1), "move")
    assert told == ["start move", "start move.gates"]
    rows, gates = arrive()
    assert told[2:] == ["wait move", "wait move.gates", "arrange move", "arrange move.gates"]
    assert (float(rows), gates) == (1.0, torch.tensor([2.0]))
    assert start_both(start, torch.zeros(1), None, "move")()[1] is None


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("degree", [2, 3, 4, 6])
def test_rows_that_a_rehearsal_deals_are_the_balanced_ones(degree: int, chunks: int) -> None:
    # 18 rows of a rank, which neither chunks nor ranks need divide.
    experts = Experts(num_experts=12, top_k=3, ffn=8)
    plan = plan_of(
        model=replace(MIXTRAL, experts=experts),
        dp_shard=degree,
        ep=degree,
        sequence_length=6,
        microbatch_sequences=1,
        experts=ExpertLayout(chunks=chunks),
    )
    assert kept_assignments(plan) == 18
    rows, pairs = (whole // chunks for whole in (18, even_pairs(plan, degree)))
    for place in range(degree):
        group = cast("Group", SimpleNamespace(size=degree, index=place))
        leaving, arriving = (
            int(way.sum() - way[place].sum()) * chunks for way in even_counts(rows, 12, group)
        )
        assert balanced_rows(plan, degree) == RowCounts(leaving=leaving, arriving=arriving)
        # Pairs of a token and a node are dealt so that as many leave as are balanced.
        away, _ = (
            int(way.sum() - way[place].sum()) * chunks for way in even_counts(pairs, 12, group)
        )
        assert balanced_pairs(plan, degree).leaving == away
