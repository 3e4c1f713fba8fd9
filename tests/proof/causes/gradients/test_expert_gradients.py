"""Loads by scope, auxiliary losses of wrong shares, and backward passes that lose something."""

from __future__ import annotations

import pytest
import torch

from echelon.core.experts import AuxiliaryScope, Balance
from echelon.proof.causes.gradients.experts import aux_loss, flat, loads_in, wrong_shares
from echelon.proof.oracle.losses import loss_of_tokens
from echelon.proof.oracle.oracle import build_decoder
from echelon.proof.shrink import shrink
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.evidence import replicas


def test_loads_are_counted_by_scope() -> None:
    chosen_NK = torch.tensor([[0, 1], [0, 2], [2, 1], [2, 0]])
    scope_N = torch.tensor([0, 1, 1, 0])
    assert loads_in(chosen_NK, scope_N, 3).tolist() == [[2, 1, 1], [1, 1, 2]]
    by_sequence = torch.arange(2 * 3 * 1).view(2, 3, 1)
    assert flat(by_sequence)[:, 0].tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("over", "axes"),
    [
        ("global", {"dp and microbatches", "dp", "microbatches", ""}),
        ("sequence", set[str]()),
    ],
)
def test_wrong_shares_give_another_loss_than_right_ones(
    over: AuxiliaryScope, axes: set[str]
) -> None:
    balance = Balance(kind="aux", aux_coefficient=0.5, aux_over=over)
    plan = shrink(plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=balance), precision="fp64")
    evidence = replicas(plan, 2)
    oracle = evidence.oracle[1]
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    loss_of_tokens(plan, model, oracle)
    found = {one.axis: loss.item() for one, loss in wrong_shares(evidence, oracle, model)}
    assert found.keys() == axes
    # Every token takes the shares of the step before: what a right run differentiates.
    last = {layer: flat(one.picked_BTK) for layer, one in evidence.oracle[0].routed.items()}
    scope_N = torch.zeros(len(next(iter(last.values()))), dtype=torch.int64)
    right = aux_loss(plan, model, last, scope_N).item()
    assert all(abs(loss / right - 1) > 1e-6 for loss in found.values())
