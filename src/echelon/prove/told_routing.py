"""One device that routes tokens as the ranks say that they did.

In a precision of few digits two experts of a token may score next to the same: which of them it
goes to is then a matter of rounding, and all that follows is not. So the oracle of such a precision
takes over the choices of the ranks. That they are right ones is judged by itself
(`prove/near_ties.py`), and all else as ever.
Why: docs/decisions/023-one-device-takes-over-the-choices-of-ranks.md.

Shape suffixes: B sequences of the global batch, T positions, N = T * B tokens, D hidden, K experts
of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from echelon.models.batch import TokenBatch
from echelon.models.mixture_reference import Routed, RoutingNotes, mixed, route_reference
from echelon.models.moe import MixtureOfExperts
from echelon.models.operations import Operations
from echelon.models.routing import gates_of
from echelon.prove.kernel_rounding import KernelOperations


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldLayer:
    """Say to which experts a layer sends each token, [B, T, K], and which of them had room."""

    chosen_BTK: torch.Tensor
    kept_BTK: torch.Tensor


ToldStep = Mapping[int, ToldLayer]
"""What is told of a step, by layer."""


@dataclass(slots=True, kw_only=True)
class ToldNotes(RoutingNotes):
    """Say, beside the rule, where tokens are to go; `own` keeps where the rule sends them."""

    told: ToldStep = field(default_factory=dict[int, ToldLayer])
    own: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class _ToldMixture(Operations):
    """Send tokens where they are told to go."""

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return the weighted sum of what the told experts make of each token, [N, D]."""
        notes = self.routing
        assert isinstance(notes, ToldNotes), "nothing was told"
        by_rule = route_reference(x_ND, mixture, batch, notes)
        notes.own[mixture.layer] = by_rule.chosen_NK
        routed = _as_told(by_rule, mixture, notes)
        notes.routed[mixture.layer] = routed
        return mixed(x_ND, mixture, routed)


class ToldOperations(_ToldMixture):
    """The plain operations, routing as told."""


class ToldKernelOperations(_ToldMixture, KernelOperations):
    """Those that round where kernels do, routing as told."""


def _as_told(routed: Routed, mixture: MixtureOfExperts, notes: ToldNotes) -> Routed:
    layer = notes.told[mixture.layer]
    chosen_NK, kept_NK = (
        one_BTK.transpose(0, 1).flatten(0, 1) for one_BTK in (layer.chosen_BTK, layer.kept_BTK)
    )
    gates_NK = gates_of(routed.scores_NE, chosen_NK, mixture.routing)
    return replace(routed, chosen_NK=chosen_NK, gates_NK=gates_NK, kept_NK=kept_NK)
