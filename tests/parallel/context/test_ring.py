"""Ring attention: keys travel while attention works, and all places have as many pairs."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.plan import ContextKind
from echelon.launch.local.supervisor import RankPool
from echelon.layout.ring_transfers import ring_plan
from echelon.models.attention.reference import attention_reference, visible
from echelon.parallel.context.ring import start_transfer
from echelon.parallel.transport.collectives import Group, Pending
from tests.parallel.context.cases import (
    T,
    context_plan,
    inputs_of,
    reference,
    run,
)

CAUSAL = AttentionMask()
STRIPED = Placement(kind="striped", ring_degree=4, ulysses_degree=1, length=16)


@pytest.mark.parametrize("kind", ["ring", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_next_keys_are_under_way_while_these_are_met(
    kind: ContextKind, causal: bool, rank_pool: RankPool
) -> None:
    plan = context_plan(kind, 4, 1, causal=causal)
    ranks = run(plan, inputs_of(plan, documents=False), rank_pool)
    for rank in ranks:
        for events, names in ((rank.forward, "ring.forward"), (rank.backward, "ring.backward")):
            work = {e.name: e for e in events if e.kind == "attend"}
            moves = {e.name: e for e in events if e.kind == "all_to_all"}
            waits = [e.start for e in events if e.kind == "wait"]
            assert {f"{names}.{step}" for step in range(1, 4)} <= set(moves)
            for step in range(3):
                # It starts before the work of this step, which nothing delays, and ends after it.
                move, here = moves[f"{names}.{step + 1}"], work[f"{names}.{step}"]
                assert move.start <= here.start
                assert move.end >= here.end
                assert not [wait for wait in waits if move.start <= wait <= here.end]
        gradients = {e.name: e for e in rank.backward if e.name.startswith("ring.gradients")}
        work = {e.name: e for e in rank.backward if e.kind == "attend"}
        for name, move in gradients.items():
            step = name.rpartition(".")[2]
            assert move.start <= work[f"ring.backward.{step}"].start
            assert move.end >= work[f"ring.backward.{step}"].end


@pytest.mark.system("S30")
def test_a_naive_split_is_wrong_and_a_ring_is_not(rank_pool: RankPool) -> None:
    """Queries that meet only the keys of their own rank give another output."""
    plan = context_plan("ring", 4, 1)
    inputs = inputs_of(plan, documents=False)
    ranks = run(plan, inputs, rank_pool)
    right = reference(plan, inputs)["out"]
    for rank in ranks:
        own = rank.positions
        alone, _ = attention_reference(
            inputs.q[own], inputs.k[own], inputs.v[own], visible(own, own, plan.model.mask, None)
        )
        assert float((alone - right[own]).abs().max()) > 0.1
        assert float((rank.out - right[own]).abs().max()) < 1e-12


@pytest.mark.system("S31")
def test_the_pairs_of_a_ring_are_spread_evenly(rank_pool: RankPool) -> None:
    """Counted from what the ranks were asked to compute, not from the formula."""
    for kind in ("ring", "striped"):
        plan = context_plan(kind, 4, 1)
        ranks = run(plan, inputs_of(plan, documents=False), rank_pool)
        work = Counter(
            {
                index: sum(
                    piece.band.num_pairs(piece.num_queries, piece.num_keys)
                    for _, _, pieces in rank.met_forward
                    for piece in pieces
                )
                for index, rank in enumerate(ranks)
            }
        )
        spread = (max(work.values()) - min(work.values())) / max(work.values())
        assert sum(work.values()) == T * (T + 1) // 2
        # Striped ranks differ by one key a query: 2 x 3 / T of the work for the last of four.
        assert spread == 0 if kind == "ring" else spread < 2 * 3 / T


class _Wire:
    """A group whose messages hold what the test puts into them."""

    def __init__(self) -> None:
        self.sends: dict[int, torch.Tensor] = {}

    def exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], *, name: str
    ) -> Pending:
        self.sends = sends
        for tensor in receives.values():
            tensor.fill_(5.0)
        return Pending()


@pytest.mark.parametrize(("add", "total"), [(False, 5.0), (True, 6.0)])
def test_what_arrives_is_put_or_added(add: bool, total: float) -> None:
    plan, wire = ring_plan(STRIPED, CAUSAL, 0), _Wire()
    step = min(plan.keys)
    arriving = [one for one in plan.keys[step] if one.target == 0]
    leaving = [one for one in plan.keys[step] if one.source == 0]
    tensors = {0: torch.arange(4.0)[:, None]}
    for one in arriving:
        block = plan.rows_from(one.owner)
        assert block is not None
        tensors[one.owner] = torch.ones(block.count, 1)
    ring: Any = wire
    start_transfer(
        plan.keys[step], tensors, plan, cast("Group", ring), name="keys", add=add
    ).finish()
    for one in arriving:
        block = plan.rows_from(one.owner)
        assert block is not None
        (place,) = block.slices_of(one.rows)
        assert tensors[one.owner][place].unique().tolist() == [total]
    assert set(wire.sends) == {one.target for one in leaving}
    (sent,) = wire.sends.values()
    assert sent.flatten().tolist() == [float(r) for a, b in leaving[0].rows for r in range(a, b)]
