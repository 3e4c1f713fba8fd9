"""How far scores must be off for a choice, or a drop, of the ranks to be the right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance
from echelon.proof.claims.choice_errors import choice_error, drop_error
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of

BALANCE = Balance(kind="both", aux_coefficient=0.1, z_coefficient=0.01, bias_rate=0.05)


DROPPING = replace(BALANCE, capacity_factor=1.0, drop="score")


def test_one_device_that_is_told_what_it_does_does_the_same() -> None:
    for balance in (BALANCE, DROPPING):
        plan = shrink(plan_of(model=DEEPSEEK, balance=balance), precision="fp64")
        steps = run_oracle(plan, 2)
        told = [_told(step) for step in steps]
        for one, other in zip(steps, run_oracle(plan, 2, forced=told), strict=True):
            assert one.loss == other.loss
            assert all(torch.equal(one.gradients[n], other.gradients[n]) for n in one.gradients)
            for layer, routed in other.routed.items():
                assert choice_error(plan, routed) == drop_error(plan, routed) == (0.0, 0)
                assert routed.aux_loss == one.routed[layer].aux_loss


def _told(step: OracleStep) -> ForcedRouting:
    return {layer: (routed.picked_BTK, routed.kept_BTK) for layer, routed in step.routed.items()}


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
def test_the_error_of_a_choice_is_half_of_the_gap_or_more(model: Any) -> None:
    plan = shrink(plan_of(model=model, balance=Balance()), precision="fp64")
    first = run_oracle(plan, 1)[0]
    layer, routed = next(iter(first.routed.items()))
    chosen, wanted_E = routed.picked_BTK[0, 0].tolist(), routed.wanted_BTE[0, 0]
    errors: dict[int, float] = {}
    for other in set(range(len(wanted_E))) - set(chosen):
        told = _told(first)
        told[layer][0][0, 0, -1] = other
        went = run_oracle(plan, 1, forced=[told])[0].routed[layer]
        errors[other], count = choice_error(plan, went)
        assert count == 1
        assert errors[other] >= float(wanted_E[chosen[-1]] - wanted_E[other]) / 2 - 1e-15
        told[layer][0][0, 0, -1] = chosen[-1]
    if model is MIXTRAL:
        best = max(errors, key=lambda expert: float(wanted_E[expert]))
        assert errors[best] == min(errors.values()) > 0
    else:
        # Three groups are more than a token may meet.
        groups = [{one // 2 for one in (*chosen[:-1], other)} for other in errors]
        assert [error == float("inf") for error in errors.values()] == [len(g) > 2 for g in groups]


@pytest.mark.parametrize("drop", ["position", "score"])
def test_who_is_dropped_is_judged_by_the_rule(drop: Any) -> None:
    balance = replace(DROPPING, kind="aux", drop=drop)
    plan = shrink(plan_of(model=MIXTRAL, balance=balance), precision="fp64")
    first = run_oracle(plan, 1)[0]
    layer, routed = next((i, one) for i, one in first.routed.items() if one.dropped)
    row, position, place = torch.nonzero(~routed.kept_BTK)[0].tolist()
    expert = routed.picked_BTK[row, position, place]
    full = (routed.picked_BTK[row] == expert) & routed.kept_BTK[row]
    told = _told(first)
    told[layer][1][row, position, place] = True

    too_many = run_oracle(plan, 1, forced=[told])[0].routed[layer]
    assert drop_error(plan, too_many) == (float("inf"), 1)

    other = torch.nonzero(full)[-1].tolist()
    told[layer][1][row, other[0], other[1]] = False
    swapped = run_oracle(plan, 1, forced=[told])[0].routed[layer]
    gap = float(routed.gates_BTK[row, other[0], other[1]] - routed.gates_BTK[row, position, place])
    error, count = drop_error(plan, swapped)
    assert count == 2
    assert error == (float("inf") if drop == "position" else pytest.approx(gap / 2))
