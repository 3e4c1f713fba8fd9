"""Auxiliary losses whose shares of loads are those of some tokens only, on one device.

Shape suffixes: N tokens of the global batch (sequence first), S scopes, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch

from echelon.core.plan import Plan
from echelon.models.decoder import Decoder
from echelon.models.routing import probabilities
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.expert_rows import token_rows
from echelon.prove.oracle import OracleStep

_AXES = {"data": "dp", "context": "cp", "tensor": "tp", "microbatch": "microbatches"}


def wrong_shares(
    evidence: Evidence, oracle: OracleStep, model: Decoder
) -> Iterator[tuple[Finding, torch.Tensor]]:
    """Yield wrong auxiliary losses of a model that has run, the narrowest scopes first.

    The loads of a global scope are of the step before.
    """
    plan, rows = evidence.reference_plan, token_rows(evidence.reference_plan)
    scope = plan.mathematics.balance.aux_over
    now = {layer: one.chosen_NK for layer, one in model.operations.routing.routed.items()}
    if scope == "global":
        if oracle.step:
            before = evidence.oracle[oracle.step - 1].routed
            last = {layer: flat(one.picked_BTK) for layer, one in before.items()}
            for names in _scopes(plan, ("data", "context", "tensor", "microbatch")):
                yield _finding(names), aux_loss(plan, model, last, rows.scope(*names))
        says = "the auxiliary loss takes the shares of this step, not of the one before"
        yield (
            Finding(factor="shares of this step", says=says),
            aux_loss(plan, model, now, torch.zeros_like(rows.row_N)),
        )
        return
    whole = ("sequence",) if scope == "sequence" else ("data", "microbatch")
    for names in _scopes(plan, ("context", "tensor")):
        yield _finding(names), aux_loss(plan, model, now, rows.scope(*whole, *names))


def flat(chosen_BTK: torch.Tensor) -> torch.Tensor:
    """Return what is given by sequence in the order of tokens, [N, K]."""
    return chosen_BTK.transpose(0, 1).flatten(0, 1)


def loads_in(chosen_NK: torch.Tensor, scope_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how many tokens of each scope chose each expert, [S, E]."""
    places = scope_N[:, None] * num_experts + chosen_NK
    size = (int(scope_N.max()) + 1) * num_experts
    return torch.bincount(places.reshape(-1), minlength=size).view(-1, num_experts)


def aux_loss(
    plan: Plan, model: Decoder, chosen: dict[int, torch.Tensor], scope_N: torch.Tensor
) -> torch.Tensor:
    """Return the auxiliary loss of all layers where each token takes the shares of its scope."""
    experts, balance = plan.model.experts, plan.mathematics.balance
    assert experts is not None, "only a model with experts has routers"
    factor = balance.aux_coefficient * experts.num_experts / plan.tokens_per_step
    losses: list[torch.Tensor] = []
    for layer, routed in model.operations.routing.routed.items():
        counts_SE = loads_in(chosen[layer], scope_N, experts.num_experts).double()
        shares_SE = counts_SE / counts_SE.sum(-1, keepdim=True)
        p_NE = probabilities(routed.scores_NE, experts)
        losses.append(factor * (p_NE * shares_SE[scope_N].to(p_NE.dtype)).sum())
    return torch.stack(losses).sum()


def _scopes(plan: Plan, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the ways to take apart tokens that some ranks, or microbatches, do not share."""
    degrees = {
        "data": plan.mesh.dp,
        "context": plan.mesh.cp,
        "tensor": plan.mesh.tp,
        "microbatch": plan.num_microbatches,
    }
    several = [name for name in names if degrees[name] > 1]
    for count in range(len(several), 0, -1):
        yield from combinations(several, count)


def _finding(names: tuple[str, ...]) -> Finding:
    axis = " and ".join(_AXES[name] for name in names)
    says = f"the auxiliary loss takes the shares of the tokens of each {axis} by itself"
    return Finding(factor="local shares", says=says, axis=axis)
