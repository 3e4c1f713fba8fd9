"""Scores, choices and gates by hand and by brute force; their gradients by finite differences."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import exp

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.models.moe import choose_experts, counts_of, gates_of, probabilities, scores_of

FOUR = Experts(num_experts=4, top_k=2, ffn=8)
LOGITS = (0.5, -1.0, 2.0, 1.0)
STYLES: dict[str, Experts] = {
    "softmax": replace(FOUR, renormalise=False),
    "softmax, renormalised": FOUR,
    "sigmoid": replace(FOUR, router="sigmoid", renormalise=False),
    "sigmoid, renormalised": replace(FOUR, router="sigmoid"),
    "sigmoid, renormalised, scaled": replace(FOUR, router="sigmoid", gate_scale=2.5),
}
NO_BALANCE = Balance()


def by_hand(experts: Experts, chosen: tuple[int, ...]) -> list[float]:
    """Return the gates of one token with the logits above, number by number."""
    if experts.router == "softmax":
        total = sum(exp(one) for one in LOGITS)
        scores = [exp(one) / total for one in LOGITS]
    else:
        scores = [1 / (1 + exp(-one)) for one in LOGITS]
    gates = [scores[e] for e in chosen]
    if experts.renormalise:
        gates = [one / sum(gates) for one in gates]
    return [one * experts.gate_scale for one in gates]


def random_logits(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, dtype=torch.float64, generator=generator)


def chosen_by(
    scores_NE: torch.Tensor,
    experts: Experts,
    bias_E: torch.Tensor | None = None,
    balance: Balance = NO_BALANCE,
) -> torch.Tensor:
    return choose_experts(scores_NE, bias_E, torch.arange(len(scores_NE)), experts, balance)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("style", STYLES)
def test_gates_equal_those_by_hand(style: str, top_k: int) -> None:
    experts = replace(STYLES[style], top_k=top_k)
    scores_NE = scores_of(torch.tensor([LOGITS], dtype=torch.float64), experts)
    chosen_NK = chosen_by(scores_NE, experts)
    best = tuple(sorted(range(4), key=lambda e: -LOGITS[e])[:top_k])
    assert tuple(chosen_NK[0].tolist()) == best
    gates = gates_of(scores_NE, chosen_NK, experts)[0].tolist()
    assert gates == pytest.approx(by_hand(experts, best), rel=1e-14)
    if experts.renormalise:
        assert sum(gates) == pytest.approx(experts.gate_scale, rel=1e-14)


@pytest.mark.parametrize("style", STYLES)
def test_gradients_of_gates_are_those_of_finite_differences(style: str) -> None:
    experts = STYLES[style]
    logits_NE = random_logits(3, 4).requires_grad_()
    chosen_NK = chosen_by(scores_of(logits_NE, experts), experts)

    def gates(logits_NE: torch.Tensor) -> torch.Tensor:
        return gates_of(scores_of(logits_NE, experts), chosen_NK, experts)

    assert torch.autograd.gradcheck(gates, (logits_NE,))


def test_the_gate_of_all_experts_renormalised_is_a_softmax_of_the_chosen_logits() -> None:
    """Mixtral's own words: a softmax over the logits of the top k."""
    logits_NE = random_logits(7, 4)
    chosen_NK = chosen_by(scores_of(logits_NE, FOUR), FOUR)
    gates_NK = gates_of(scores_of(logits_NE, FOUR), chosen_NK, FOUR)
    torch.testing.assert_close(gates_NK, logits_NE.gather(-1, chosen_NK).softmax(-1))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_probabilities_add_up_to_one(router: str) -> None:
    experts = replace(FOUR, router=router)
    scores_NE = scores_of(random_logits(5, 4), experts)
    torch.testing.assert_close(
        probabilities(scores_NE, experts).sum(-1), torch.ones(5, dtype=torch.float64)
    )


def test_a_bias_moves_the_choice_and_leaves_the_gates_alone() -> None:
    experts = replace(STYLES["sigmoid"], router_bias=True)
    scores_NE = scores_of(torch.tensor([LOGITS], dtype=torch.float64), experts)
    bias_E = torch.tensor([0.0, 9.0, -9.0, 0.0], dtype=torch.float64)
    chosen_NK = chosen_by(scores_NE, experts, bias_E)
    assert chosen_NK.tolist() == [[1, 3]]
    assert gates_of(scores_NE, chosen_NK, experts)[0].tolist() == pytest.approx(
        by_hand(experts, (1, 3)), rel=1e-14
    )


@pytest.mark.parametrize("top_groups", [1, 2, 3])
def test_groups_limit_the_choice_as_brute_force_does(top_groups: int) -> None:
    """Of each group count the two best scores; of the best groups take the best experts."""
    experts = replace(FOUR, num_experts=12, top_k=3, groups=4, top_groups=top_groups)
    scores_NE = scores_of(random_logits(40, 12), experts)
    for scores, chosen in zip(scores_NE.tolist(), chosen_by(scores_NE, experts), strict=True):
        members = [range(3 * g, 3 * g + 3) for g in range(4)]
        worth = [max(scores[a] + scores[b] for a, b in combinations(m, 2)) for m in members]
        best = sorted(range(4), key=lambda g: -worth[g])[:top_groups]
        open_to = [e for g in best for e in members[g]]
        wanted = sorted(open_to, key=lambda e: -scores[e])[:3]
        assert chosen.tolist() == wanted
        assert len({e // 3 for e in chosen.tolist()}) <= top_groups


def test_a_route_can_be_set_apart_from_the_scores() -> None:
    scores_NE = scores_of(random_logits(8, 4), FOUR)
    even = chosen_by(scores_NE, FOUR, balance=Balance(route="even"))
    assert counts_of(even, 4).tolist() == [4, 4, 4, 4]
    one = chosen_by(scores_NE, FOUR, balance=Balance(route="one"))
    assert counts_of(one, 4).tolist() == [8, 8, 0, 0]
    rest = chosen_by(scores_NE, FOUR, balance=Balance(route="not-last"))
    assert counts_of(rest, 4)[-1] == 0
    assert counts_of(rest, 4).sum() == 16


def test_a_score_that_is_not_a_number_still_chooses_experts() -> None:
    """Whoever reports it must get that far: each choice is an expert that there is."""
    logits_NE = random_logits(3, 12)
    logits_NE[1] = torch.nan
    for groups in (1, 4):
        experts = replace(FOUR, num_experts=12, groups=groups, top_groups=min(2, groups))
        chosen_NK = chosen_by(scores_of(logits_NE, experts), experts)
        assert int(chosen_NK.min()) >= 0
        assert int(chosen_NK.max()) < 12
        assert all(len(set(row)) == 2 for row in chosen_NK.tolist())
