"""How one device routes: losses by hand, loads, and the state that the next step takes over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.plan import Plan
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.oracle.routing import TOKEN_DROPPED, RoutingState
from echelon.proof.shrink import shrink
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, NANO, plan_of


def make(model: Any = MIXTRAL, **balance: Any) -> Plan:
    return shrink(plan_of(model=model, balance=Balance(**balance)), precision="fp64")


def test_the_first_step_knows_nothing_of_loads() -> None:
    state = RoutingState.start(make(DEEPSEEK, kind="bias"), torch.bfloat16)
    (layer,) = state.shares  # the first block is dense
    assert state.shares[layer].dtype == state.biases[layer].dtype == torch.float32
    assert float(state.shares[layer].sum()) == 1.0
    assert not state.biases[layer].any()
    assert RoutingState.start(make(MIXTRAL), torch.float64).biases == {}
    assert RoutingState.start(shrink(plan_of(model=NANO)), torch.float64).shares == {}


def test_loads_move_biases_and_are_the_next_shares() -> None:
    first, second = run_oracle(make(DEEPSEEK, kind="bias", bias_rate=0.25), 2)
    for layer, routed in first.routed.items():
        counts = [int((routed.picked_BTK == expert).sum()) for expert in range(8)]
        assert routed.counts_E.tolist() == counts
        assert second.routing.shares[layer].tolist() == [n / sum(counts) for n in counts]
        mean = sum(counts) / 8
        signs = [(mean > count) - (mean < count) for count in counts]
        assert second.routing.biases[layer].tolist() == [0.25 * sign for sign in signs]
        assert routed.imbalance == max(counts) / mean
        scores_BTE = second.routed[layer].wanted_BTE - second.routing.biases[layer]
        assert float(scores_BTE.min()) >= 0.0
        assert float(scores_BTE.max()) <= 1.0  # a sigmoid, once the bias is off


@pytest.mark.parametrize("over", ["global", "sequence", "microbatch"])
def test_even_loads_have_an_auxiliary_loss_of_the_coefficient_times_the_choices(over: Any) -> None:
    # E x sum(f p) with f = 1 / E is the sum of probabilities: 1 for a softmax, for each layer.
    plan = make(kind="aux", aux_coefficient=0.125, aux_over=over, route="even")
    for routed in run_oracle(plan, 1)[0].routed.values():
        if over == "global":
            assert routed.aux_loss == pytest.approx(0.125, rel=0.1)
        assert 0.0 < routed.aux_loss < 0.25
        assert int(routed.counts_E.max() - routed.counts_E.min()) <= 1


def test_the_z_loss_goes_with_its_coefficient_and_is_no_auxiliary_loss() -> None:
    once, twice = (run_oracle(make(z_coefficient=one), 1)[0] for one in (0.125, 0.25))
    for layer, routed in once.routed.items():
        assert twice.routed[layer].z_loss == pytest.approx(2 * routed.z_loss, rel=1e-14)
        assert routed.z_loss > 0.0
        assert routed.aux_loss == 0.0
    assert once.loss == twice.loss  # that of tokens
    assert once.grad_norm != twice.grad_norm


def test_what_has_no_room_is_marked() -> None:
    routed = next(iter(run_oracle(make(capacity_factor=1.0, route="one"), 1)[0].routed.values()))
    assert routed.dropped == int((~routed.kept_BTK).sum()) > 0
    assert int((routed.chosen_BTK == TOKEN_DROPPED).sum()) == routed.dropped
    assert torch.equal(routed.chosen_BTK[routed.kept_BTK], routed.picked_BTK[routed.kept_BTK])
