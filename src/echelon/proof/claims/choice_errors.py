# SPDX-License-Identifier: Apache-2.0
"""How far scores must be off for a choice of experts to be the right one.

A token goes to the experts that score highest. Where ranks chose others, some score of theirs was
another than the oracle's: of two experts that lie `gap` apart one is off by gap / 2 or more. The
least such error is what a choice asks for; it is judged like any other error of a score.

In float64 too two scores may be the same but for rounding. Ranks and oracle may then choose, or
drop, either: the oracle is run again with the choices of the ranks, as far as they are ties.

Shape suffixes: B sequences, T positions, N tokens, E experts, K experts of a token, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch

from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.models.moe import kept_assignments
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.observed import ObservedRun, routing_from_ranks
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.oracle.routing import RoutedLayer

_BEST_OF_GROUP = 2  # scores that rank a group


def choice_error(plan: Plan, routed: RoutedLayer) -> tuple[float, int]:
    """Return the error that the choices ask of some score, and of how many tokens they differ.

    `routed` holds the oracle's scores, and the choices that the ranks told it.
    """
    experts, balance = plan.model.experts, plan.mathematics.balance
    assert experts is not None, "only a layer with experts routes"
    right_NK, picked_NK = routed.right_BTK.flatten(0, 1), routed.picked_BTK.flatten(0, 1)
    other_N = (right_NK.sort(-1).values != picked_NK.sort(-1).values).any(-1)
    differ = int(other_N.sum())
    if balance.route in ("even", "one"):
        # No score decides.
        return (math.inf if differ else 0.0), differ
    wanted_NE = routed.wanted_BTE.flatten(0, 1)
    if balance.route == "not-last" and experts.num_experts > experts.top_k:
        wanted_NE = wanted_NE.clone()
        wanted_NE[:, -1] = -torch.inf
    errors = [
        _error(wanted_E, picked_K.tolist(), experts)
        for wanted_E, picked_K in zip(wanted_NE[other_N], picked_NK[other_N], strict=True)
    ]
    return max(errors, default=0.0), differ


def _error(wanted_E: torch.Tensor, picked: list[int], experts: Experts) -> float:
    """Return the least error of a score with which a token goes to the experts `picked`."""
    if experts.groups == 1:
        return _gap(wanted_E, picked, range(experts.num_experts)) / 2
    size = experts.num_experts // experts.groups
    best = min(_BEST_OF_GROUP, size)
    worth_G = wanted_E.view(experts.groups, size).topk(best, dim=-1).values.sum(-1)
    errors = [math.inf]
    for groups in combinations(range(experts.groups), experts.top_groups):
        inside = [expert for expert in range(len(wanted_E)) if expert // size in groups]
        if set(picked) <= set(inside):
            of_groups = _gap(worth_G, list(groups), range(experts.groups)) / (2 * best)
            errors.append(max(of_groups, _gap(wanted_E, picked, inside) / 2))
    return min(errors)


def _gap(worth: torch.Tensor, picked: list[int], among: list[int] | range) -> float:
    """Return by how much the best that was not picked is above the worst that was."""
    left = [float(worth[one]) for one in among if one not in picked]
    return max(0.0, max(left, default=-math.inf) - min(float(worth[one]) for one in picked))


def drop_error(plan: Plan, routed: RoutedLayer) -> tuple[float, int]:
    """Return the error that the drops ask of some gate, and how many assignments differ."""
    experts, balance = plan.model.experts, plan.mathematics.balance
    assert experts is not None, "only a layer with experts routes"
    length = plan.mathematics.sequence_length
    room = balance.capacity(length, experts.num_experts, experts.top_k)
    if room is None:
        dropped = int((~routed.kept_BTK).sum())
        return (math.inf if dropped else 0.0), dropped
    sequence_N = torch.arange(len(routed.picked_BTK)).repeat_interleave(length)
    right_NK = kept_assignments(
        routed.picked_BTK.flatten(0, 1),
        routed.gates_BTK.flatten(0, 1),
        sequence_N,
        num_experts=experts.num_experts,
        capacity=room,
        drop=balance.drop,
    )
    kept_BTK = routed.kept_BTK
    differ = int((right_NK != kept_BTK.flatten(0, 1)).sum())
    if differ == 0 or balance.drop == "position":
        return (math.inf if differ else 0.0), differ
    errors: list[float] = []
    for picked, gates, keeps in zip(routed.picked_BTK, routed.gates_BTK, kept_BTK, strict=True):
        for expert in range(experts.num_experts):
            mine, its_gates = keeps[picked == expert], gates[picked == expert]
            if int(mine.sum()) != min(room, len(mine)):
                return math.inf, differ
            lost, won = its_gates[~mine], its_gates[mine]
            errors.append(float(lost.max() - won.min()) / 2 if len(lost) else 0.0)
    return max(0.0, *errors), differ


def signature(chosen_BTK: torch.Tensor, kept_BTK: torch.Tensor) -> torch.Tensor:
    """Return the experts of each token in order of number, with whether they had room."""
    return (2 * chosen_BTK + kept_BTK.long()).sort(-1).values


def with_ties_of_ranks(
    reference: Plan, oracle: Sequence[OracleStep], observed: ObservedRun
) -> Sequence[OracleStep]:
    """Return the float64 oracle; where the ranks decided ties otherwise, with their choices.

    From the first choice on that is no tie, the oracle goes its own way.
    """
    told = routing_from_ranks(observed, len(oracle))
    if told is None or not any(
        not torch.equal(
            signature(one.routed[layer].picked_BTK, one.routed[layer].kept_BTK), signature(*routes)
        )
        for one, layers in zip(oracle, told, strict=True)
        for layer, routes in layers.items()
    ):
        return oracle
    tried = run_oracle(reference, len(oracle), forced=told)
    ties = _up_to_first_choice(reference, tried, told)
    if all(len(some) == len(layers) for some, layers in zip(ties, told, strict=True)):
        return tried
    return run_oracle(reference, len(oracle), forced=ties) if any(ties) else oracle


def _up_to_first_choice(
    plan: Plan, tried: Sequence[OracleStep], told: Sequence[ForcedRouting]
) -> list[ForcedRouting]:
    """Return what was told up to the first layer where a worse score was preferred."""
    ties: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in told]
    for number, (one, layers) in enumerate(zip(tried, told, strict=True)):
        for layer in sorted(layers):
            routed = one.routed[layer]
            error = max(choice_error(plan, routed)[0], drop_error(plan, routed)[0])
            if not error <= FLOAT64_TOLERANCE:
                return list(ties)
            ties[number][layer] = layers[layer]
    return list(ties)
