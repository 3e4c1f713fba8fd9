"""What evens the load, on a toy: a router, a stream of tokens that want the same experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance
from echelon.models.moe import gates_of, scores_of
from tests.parallel.expert.toy import EIGHT, Toy


@pytest.mark.system("S36")
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_bias_evens_a_skewed_stream_and_leaves_gates_alone(router: Any) -> None:
    experts = replace(EIGHT, router=router, router_bias=True, renormalise=False)
    toy = Toy(experts, Balance(kind="bias", bias_rate=0.01))
    before = toy.weight_ED.clone()
    imbalance: list[float] = []
    for _ in range(150):
        bias_E = toy.parallel.router.balancer.biases[0].clone()
        routed, load = toy.step()
        toy.parallel.router.balancer.update()
        imbalance.append(load.imbalance)
        moved_E = toy.parallel.router.balancer.biases[0] - bias_E
        away_E = torch.sign(32.0 - torch.tensor(load.counts, dtype=torch.float64))
        torch.testing.assert_close(moved_E, 0.01 * away_E)
        scores_nE = scores_of(toy.x_nD @ before.t(), experts)
        gates_nK = gates_of(scores_nE, routed.chosen_nK, experts)
        torch.testing.assert_close(routed.gates_nK, gates_nK)
    assert imbalance[0] > 2
    assert imbalance[-1] < 1.3
    assert torch.equal(before, toy.weight_ED)
    assert not toy.gradient().any()
