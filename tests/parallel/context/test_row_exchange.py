"""Rows on their way around a ring: arrivals are put where they belong, or added there."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.layout.ring_plan import ring_plan
from echelon.parallel.context.row_exchange import start_transfer
from echelon.parallel.transport.collectives import Group, Pending

CAUSAL = AttentionMask()
STRIPED = Placement(kind="striped", ring_degree=4, ulysses_degree=1, length=16)


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
