"""Moves with transposes: each one's own transpose is itself again."""

from __future__ import annotations

import torch

from echelon.core.event import NoEvents
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.differentiable import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    exchange_rows,
    from_source,
    moved,
)
from echelon.parallel.transport.recorder import Recorder


def test_pairs_of_transposes() -> None:
    assert ALL_REDUCE[::-1] == ALL_REDUCE
    assert ALL_GATHER[::-1] == REDUCE_SCATTER


def test_a_rank_alone_keeps_what_it_has_and_its_gradient() -> None:
    group = Group("", (0,), 0, None, Recorder(0, NoEvents()))
    for move in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, exchange_rows((3,), (3,)), from_source(0)):
        x = torch.arange(6.0).view(3, 2).requires_grad_()
        y = moved(x, group, move)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
        assert torch.equal(y, x)
        assert torch.equal(gradient, torch.full_like(x, 2.0))
