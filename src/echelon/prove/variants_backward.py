"""Backward passes of experts that are not those of their forward, on one device.

The forward is right; the gradient of a gate is that of a piece of an expert, or the layer is
routed anew by other biases.

Shape suffixes: N tokens (sequence first), D hidden, K experts of a token, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch.nn import functional as fn

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.mixture_reference import RoutingNotes, route_reference
from echelon.models.moe import Expert, MixtureOfExperts
from echelon.models.operations import Operations
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.expert_rows import token_rows
from echelon.prove.oracle import OracleStep
from echelon.prove.variants_experts import assignments

Biases = Mapping[int, torch.Tensor]


class PiecesApart(Operations):
    """Give each gate the gradient of the piece of its expert on the rank that routes its token."""

    def __init__(self, plan: Plan) -> None:
        """Take pieces and ranks from `plan`."""
        self.pieces = plan.layout.experts.expert_tp
        self.tensor_N = token_rows(plan).tensor_N

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what the experts make, piece by piece."""
        routed = route_reference(x_ND, mixture, batch, self.routing)
        self.routing.routed[mixture.layer] = routed
        y_ND = torch.zeros_like(x_ND)
        for name, module in mixture.experts.items():
            expert = cast(Expert, module)
            token, place = torch.nonzero((routed.chosen_NK == int(name)) & routed.kept_NK).unbind(
                -1
            )
            gates, x = routed.gates_NK[token, place], x_ND[token]
            inner = (fn.silu(expert.gate(x)) * expert.up(x)).chunk(self.pieces, dim=-1)
            down = expert.down.weight.chunk(self.pieces, dim=-1)
            for piece in range(self.pieces):
                own = self.tensor_N[token] == piece
                weights = torch.where(own, gates, gates.detach())
                y_ND = y_ND.index_add(0, token, inner[piece] * weights[:, None] @ down[piece].t())
        return y_ND + mixture.shared(x_ND) if hasattr(mixture, "shared") else y_ND


class RoutedAnew(Operations):
    """Go forward by the right biases, and backward through what other ones would give."""

    def __init__(self, plan: Plan, biases: Biases) -> None:
        """Route by `biases` in backward, in the layers that are recomputed."""
        self.recompute, self.biases = plan.layout.recompute, biases

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return the right output, with the gradient of another."""
        if not self.recompute.recomputes(mixture.layer):
            return super().mixture(x_ND, mixture, batch)
        with torch.no_grad():
            right_ND = super().mixture(x_ND, mixture, batch)
        right = self.routing.routed[mixture.layer]
        other = RoutingNotes(balance=self.routing.balance, biases=self.biases)
        anew = route_reference(x_ND, mixture, batch, other)
        # The losses of routers are made anew, too: their counts are of before.
        self.routing.routed[mixture.layer] = replace(anew, chosen_NK=right.chosen_NK)
        rows_SD = assignments(x_ND, mixture, anew)
        y_ND = rows_SD.unflatten(0, anew.chosen_NK.shape).sum(1)
        if hasattr(mixture, "shared"):
            y_ND = y_ND + mixture.shared(x_ND)
        return y_ND + (right_ND - y_ND).detach()


def backward_variants(
    evidence: Evidence, oracle: OracleStep
) -> Iterator[tuple[Finding, Callable[[], Operations]]]:
    """Yield the mistakes that are made in backward alone, each with operations that make it."""
    plan = evidence.reference_plan
    if plan.layout.experts.expert_tp > 1:
        says = "gates have the gradient of one piece of an expert: not summed over its pieces"
        yield Finding(factor="missing sum", says=says, axis="tp"), lambda: PiecesApart(plan)
    if plan.layout.recompute.policy != "none" and oracle.routing.biases:
        biases: list[tuple[str, Biases]] = [
            ("no biases", {i: torch.zeros_like(b) for i, b in oracle.routing.biases.items()}),
            ("the biases of the next step", oracle.routing_after.biases),
        ]
        if oracle.step:
            last = evidence.oracle[oracle.step - 1].routing.biases
            biases.append(("the biases of the step before", last))
        for which, other in biases:
            says = f"what is recomputed is routed anew, by {which}"
            finding = Finding(factor="routed anew", says=says)
            yield finding, lambda other=other: RoutedAnew(plan, other)
