"""Choices, gates, room and losses of experts, on numbers that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.proof.independent.mixture import (
    SequenceRoutes,
    auxiliary_loss,
    first_state,
    loads_of,
    mix,
    next_state,
    route,
    router_losses,
    z_loss,
)
from tests.parallel.layouts import NANO
from tests.proof.independent.running import random_weights, sequence_run

EXPERTS = Experts(num_experts=4, top_k=2, ffn=8)
MODEL = replace(NANO, experts=EXPERTS)
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def routes_of(experts: Experts = EXPERTS, **changes: object) -> SequenceRoutes:
    """Return how the tokens of X go."""
    model = replace(MODEL, experts=experts)
    run = sequence_run(model, random_weights(model), [0] * 5, **changes)
    return route(run, X, experts)


def test_tokens_go_to_the_highest_scores_and_gates_add_up_to_one() -> None:
    routes = routes_of()
    best = routes.scores_TE.topk(2).indices
    assert routes.chosen == best.tolist()
    torch.testing.assert_close(routes.gates_TK.sum(-1), torch.ones(5, dtype=torch.float64))
    scaled = routes_of(replace(EXPERTS, renormalise=False, gate_scale=2.5, router="sigmoid"))
    right = 2.5 * scaled.logits_TE.sigmoid().gather(1, torch.tensor(scaled.chosen))
    torch.testing.assert_close(scaled.gates_TK, right)


def test_a_bias_takes_part_in_the_choice_only() -> None:
    plain = routes_of()
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    biased = routes_of(biases={0: bias})
    assert all(row[0] == 3 for row in biased.chosen)
    assert biased.scores_TE.equal(plain.scores_TE)


def test_groups_bound_the_choice() -> None:
    grouped = replace(EXPERTS, groups=2, top_groups=1)
    routes = routes_of(grouped)
    assert all({*row} in ({0, 1}, {2, 3}) for row in routes.chosen)
    value = routes.scores_TE.reshape(5, 2, 2).sum(-1)
    assert [row[0] // 2 for row in routes.chosen] == value.argmax(-1).tolist()


def test_each_expert_has_room_for_its_share_of_a_sequence() -> None:
    balance = Balance(capacity_factor=1.0, route="one")
    routes = routes_of(balance=balance)
    assert routes.kept == [[True, True]] * 3 + [[False, False]] * 2
    by_score = routes_of(balance=replace(balance, drop="score"))
    gates = by_score.gates_TK[:, 0].tolist()
    kept = {t for t, row in enumerate(by_score.kept) if row[0]}
    assert kept == set(sorted(range(5), key=lambda t: -gates[t])[:3])
    even = routes_of(balance=Balance(route="even"), sample=1)
    assert even.chosen[0] == [2, 3]
    never = routes_of(balance=Balance(route="not-last"))
    assert not any(3 in row for row in never.chosen)


@pytest.mark.parametrize("limit", [None, 0.02])
def test_the_output_is_the_sum_of_gated_experts(limit: float | None) -> None:
    model = replace(MODEL, experts=replace(EXPERTS, limit=limit))
    run = sequence_run(model, random_weights(model), [0] * 5)
    routes = route(run, X, EXPERTS)
    right, beyond = torch.zeros_like(X), 0
    for t, row in enumerate(routes.chosen):
        for k, expert in enumerate(row):
            name = f"mlp.experts.{expert}"
            gate, up = run.linear(X[t], f"{name}.gate"), run.linear(X[t], f"{name}.up")
            inner = torch.nn.functional.silu(gate) * up
            if limit is not None:
                beyond += int((gate > limit).sum() + (up.abs() > limit).sum())
                cut = gate.clamp(max=limit)
                inner = cut * (1.702 * cut).sigmoid() * (up.clamp(-limit, limit) + 1)
            right[t] += routes.gates_TK[t, k] * run.linear(inner, f"{name}.down")
    torch.testing.assert_close(mix(run, X, routes), right)
    assert (beyond > 0) == (limit is not None)


def test_an_even_load_has_the_least_auxiliary_loss() -> None:
    routes = routes_of()
    balance = Balance(kind="aux", aux_coefficient=0.5, z_coefficient=0.1)
    even = auxiliary_loss([routes], EXPERTS, balance, [0.25] * 4)
    assert float(even) == pytest.approx(0.5)
    right = 0.1 * routes.logits_TE.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(z_loss([routes], balance), right)
    state = first_state(MODEL, [0])
    total, told = router_losses({0: [routes]}, EXPERTS, balance, state, 1)
    assert float(total) == pytest.approx(0.5 + float(right))
    assert told[0][0] != pytest.approx(0.5)
    assert told[0][1] == pytest.approx(float(right))


def test_a_bias_moves_against_the_load() -> None:
    biased = replace(MODEL, experts=replace(EXPERTS, router_bias=True))
    state = first_state(biased, [0])
    routes = routes_of(balance=Balance(route="one"))
    assert loads_of([routes], 4) == [5, 5, 0, 0]
    after = next_state(state, {0: [routes]}, Balance(kind="bias", bias_rate=0.1))
    assert after.biases[0].tolist() == [-0.1, -0.1, 0.1, 0.1]
    assert after.shares[0] == [0.5, 0.5, 0.0, 0.0]
    assert first_state(NANO, []).biases == {}
