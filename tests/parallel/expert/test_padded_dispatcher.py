"""Padded dispatch: the same bytes for every routing, shapes without data, empty slots of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.event import EventList
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.layout.expert_load import slots_per_expert
from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.expert.token_dispatcher import FlatTokenDispatcher, PaddedTokenDispatcher
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from echelon.rehearsal.order import HostRead, RankLog
from echelon.rehearsal.shapes import ShapesOnly
from tests.parallel.expert import targets as expert_targets
from tests.parallel.expert.targets import EXPERTS, Mixed, mixture_plan, stream_of

ELEMENT = 8
"""Bytes of a float64."""
SPLITS: dict[str, dict[str, Any]] = {
    "ep2": {"dp_shard": 2, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "ep4 over cp and tp": {"cp": 2, "tp": 2, "ep": 4},
    "pieces": {"dp_shard": 2, "tp": 2, "ep": 2, "layout": ExpertLayout(expert_tp=2, padded=True)},
}
MOTIONS = {
    "experts.dispatch": True,
    "experts.combine": False,
    "experts.combine.backward": False,
    "experts.dispatch.backward": True,
}
"""What is sent, and whether gates go with it."""


def padded_plan(split: str, **balance: Any) -> Plan:
    settings = {"layout": ExpertLayout(padded=True), **SPLITS[split]}
    return mixture_plan(balance=Balance(**{"capacity_factor": 1.0, **balance}), **settings)


def run(plan: Plan, pool: RankPool) -> list[Mixed]:
    return pool.run(expert_targets.mix, (plan, stream_of(plan)), world_size=plan.mesh.world_size)


@pytest.mark.quick("ep2-2.0", "ep4-0.75", "ep2-0.75")
@pytest.mark.parametrize("factor", [0.75, 2.0])
@pytest.mark.parametrize("split", SPLITS)
def test_what_is_sent_does_not_depend_on_the_routing(
    split: str, factor: float, rank_pool: RankPool
) -> None:
    seen: set[tuple[tuple[str, int], ...]] = set()
    for route in ("scores", "even", "one"):
        plan = padded_plan(split, route=route, capacity_factor=factor)
        for rank in run(plan, rank_pool):
            sent = rank.sent("ep")
            seen.add(tuple(sent.items()))
            assert len({tuple(rows) for rows in rank.arrived}) == 1
            assert sent == stated(plan)
    assert len(seen) == 1


def stated(plan: Plan) -> dict[str, int]:
    """Return the bytes of each motion: slots of all experts that are on other ranks."""
    mathematics, ep = plan.mathematics, plan.mesh.ep
    tokens = plan.local_tokens // (plan.mesh.tp if plan.layout.experts.expert_tp == 1 else 1)
    room = mathematics.balance.capacity(mathematics.sequence_length, 8, EXPERTS.top_k)
    assert room is not None
    slots = slots_per_expert(tokens, plan.layout.microbatch_sequences, room)
    away = (ep - 1) * EXPERTS.num_experts // ep * slots
    sent: dict[str, int] = {}
    for name, gated in MOTIONS.items():
        sent[name] = away * plan.model.hidden * ELEMENT
        if gated:
            sent[f"{name}.gates"] = away * ELEMENT
    return sent


def alone() -> Group:
    return Group("ep", (0,), 0, None, Recorder(0, EventList()))


def routed(device: str) -> TokenRouting:
    """Return a route of five tokens to two of four experts, one assignment dropped."""
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0], [1, 2]])
    kept = torch.ones_like(chosen, dtype=torch.bool)
    kept[3, 1] = False
    gates = torch.arange(1.0, 11.0, dtype=torch.float64).view(5, 2)
    return TokenRouting(
        gates_nK=gates.to(device), chosen_nK=chosen.to(device), kept_nK=kept.to(device)
    )


def test_slots_are_filled_in_the_order_of_the_tokens_and_the_rest_is_zero() -> None:
    one = routed("cpu")
    carrier = PaddedTokenDispatcher(one, 4, alone(), 4)
    assert list(carrier.rows_by_expert) == [4] * 4
    x_nD = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None].expand(5, 3).contiguous()
    rows, gates = carrier.dispatch(x_nD, one.gates_nK, name="there")()
    filled = [[1, 2, 3, 0], [1, 3, 5, 0], [2, 5, 0, 0], [4, 0, 0, 0]]
    assert rows[:, 0].view(4, 4).tolist() == filled
    assert gates is not None
    assert gates.view(4, 4).tolist() == [[1, 3, 5, 0], [2, 6, 9, 0], [4, 10, 0, 0], [7, 0, 0, 0]]


def test_what_comes_back_in_an_empty_slot_is_not_read() -> None:
    one = routed("cpu")
    carrier = PaddedTokenDispatcher(one, 4, alone(), 4)
    x_nD = torch.ones(5, 3, dtype=torch.float64)
    rows, gates = carrier.dispatch(x_nD, one.gates_nK, name="there")()
    assert gates is not None
    empty = gates == 0
    y_nD, dgates_nK = carrier.combine(
        rows.masked_fill(empty[:, None], torch.nan),
        gates.masked_fill(empty, torch.nan),
        name="back",
    )()
    assert y_nD[:, 0].tolist() == [2, 2, 2, 1, 2]
    assert dgates_nK is not None
    assert dgates_nK.tolist() == [[1, 2], [3, 4], [5, 6], [7, 0], [9, 10]]


def test_scatter_and_collect_are_transposes() -> None:
    one = routed("cpu")
    carrier = PaddedTokenDispatcher(one, 4, alone(), 3)
    generator = torch.Generator().manual_seed(0)
    x_nD, y_RD = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (5, 12))
    there, _ = carrier.dispatch(x_nD, None, name="there")()
    back, _ = carrier.combine(y_RD, None, name="back")()
    torch.testing.assert_close((there * y_RD).sum(), (x_nD * back).sum())


def test_shapes_follow_from_the_plan_alone() -> None:
    """On the meta device there is no routing to look at."""
    one = routed("meta")
    carrier = PaddedTokenDispatcher(one, 4, alone(), 4)
    x_nD = torch.empty(5, 3, dtype=torch.float64, device="meta")
    rows, gates = carrier.dispatch(x_nD, one.gates_nK, name="there")()
    assert gates is not None
    assert (tuple(rows.shape), tuple(gates.shape)) == ((16, 3), (16,))
    y_nD, dgates_nK = carrier.combine(rows, gates, name="back")()
    assert dgates_nK is not None
    assert (tuple(y_nD.shape), tuple(dgates_nK.shape)) == ((5, 3), (5, 2))
    assert list(carrier.rows_by_expert) == [4, 4, 4, 4]


def test_a_rehearsal_spreads_rows_evenly_where_sizes_follow_from_the_routing() -> None:
    log = RankLog(0)
    one = routed("meta")
    with ShapesOnly(log):
        carrier = FlatTokenDispatcher(one, 4, alone())
        assert list(carrier.rows_by_expert) == [3, 3, 2, 2]
    assert [type(entry) for entry in log.entries] == [HostRead]
