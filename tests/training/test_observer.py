"""The summary of routing that an observer is told."""

from __future__ import annotations

import torch

from echelon.training.observer import RoutingSummary


def test_the_summary_adds_ranks_up() -> None:
    rows = torch.tensor([[8.0, 1.0, 1.0, 0.5, 2.0], [0.0] * 5, [8.0, 3.0, 0.5, 0.0, 1.5]])
    summary = RoutingSummary.from_rows(rows)
    assert (summary.assignments, summary.dropped) == (16, 4)
    assert (summary.aux_loss, summary.z_loss, summary.imbalance) == (1.5, 0.5, 2.0)
    assert summary.dropped_share == 0.25
    assert RoutingSummary.from_rows(torch.zeros(2, 5)).dropped_share == 0.0
