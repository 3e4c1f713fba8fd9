"""What a step says of its experts: rows of ranks, and their sum."""

from __future__ import annotations

import torch

from echelon.parallel.expert import LayerLoad
from echelon.training.routing import RoutingSummary, routing_row


def load(counts: tuple[int, ...], dropped: int) -> LayerLoad:
    return LayerLoad(counts=counts, dropped=dropped, aux_loss=0.5, z_loss=0.25)


def test_a_row_sums_the_layers_and_keeps_the_worst_imbalance() -> None:
    loads = {0: load((2, 2), 1), 1: load((4, 0), 0)}
    assert routing_row(loads, reports=True) == [8.0, 1.0, 1.0, 0.5, 2.0]


def test_a_rank_whose_stage_another_tells_of_adds_nothing() -> None:
    assert routing_row({0: load((2, 2), 1)}, reports=False) == [0.0] * 5
    assert routing_row({}, reports=True) == [0.0] * 5


def test_the_summary_adds_ranks_up() -> None:
    rows = torch.tensor([[8.0, 1.0, 1.0, 0.5, 2.0], [0.0] * 5, [8.0, 3.0, 0.5, 0.0, 1.5]])
    summary = RoutingSummary.from_rows(rows)
    assert (summary.assignments, summary.dropped) == (16, 4)
    assert (summary.aux_loss, summary.z_loss, summary.imbalance) == (1.5, 0.5, 2.0)
    assert summary.dropped_share == 0.25
    assert RoutingSummary.from_rows(torch.zeros(2, 5)).dropped_share == 0.0
