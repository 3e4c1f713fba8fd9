"""What rows on their way to experts allocate, seen by the allocator itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.layout.expert_load import dispatched_tokens
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.expert.layer import TokenDispatcher, make_dispatcher
from echelon.parallel.expert.router import RoutedTokens, TokenRouting
from echelon.parallel.transport.recorder import Recorder
from tests.cost.context_memory_targets import REPEATS, Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMemory:
    """The most bytes in memory on the way to experts and back, and the rows that met experts.

    What is taken back is there before, and counts.
    """

    there: int
    back: int
    rows: int


def rows_allocate(context: RankContext, argument: tuple[Plan, bool]) -> DispatchMemory:
    """Send rows and gates to experts and back: to each in turn, or all to those of rank 0.

    The least of several runs counts, as for attention.
    """
    plan, to_one = argument
    torch.set_num_threads(1)
    groups = rank_groups(plan, Recorder(context.rank, NoEvents()))
    runs = [_travel(plan, groups, to_one) for _ in range(REPEATS)]
    return DispatchMemory(
        there=min(run.there for run in runs),
        back=min(run.back for run in runs),
        rows=runs[0].rows,
    )


def _travel(plan: Plan, groups: RankGroups, to_one: bool) -> DispatchMemory:
    experts = plan.model.experts
    assert experts is not None
    tokens, k = dispatched_tokens(plan), experts.top_k
    number = torch.arange(tokens * k).view(tokens, k)
    chosen = number % (k if to_one else experts.num_experts)
    gates = torch.rand(tokens, k)
    routed = TokenRouting(gates_nK=gates, chosen_nK=chosen, kept_nK=None)
    every = torch.arange(tokens)
    told = RoutedTokens(
        key_n=every, number_n=every, num_sequences=1, length=plan.mathematics.sequence_length
    )
    carrier: TokenDispatcher = make_dispatcher(plan, groups, routed, told)
    x = torch.rand(tokens, plan.model.hidden)

    def go() -> tuple[torch.Tensor, torch.Tensor | None]:
        return carrier.dispatch(x, gates, name="there")()

    there = Allocation(go)
    rows, row_gates = there.take()
    assert row_gates is not None
    given = rows.nbytes + row_gates.nbytes

    def come_back() -> tuple[torch.Tensor, torch.Tensor | None]:
        return carrier.combine(rows, row_gates, name="back")()

    back = Allocation(come_back)
    return DispatchMemory(there=there.peak, back=given + back.peak, rows=len(rows))
