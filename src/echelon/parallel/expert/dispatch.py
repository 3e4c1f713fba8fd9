"""Which way tokens take to their experts: the carrier that a layout asks for."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.cost.expert_slots import slots_per_expert
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.expert.carrier import Carrier, FlatCarrier
from echelon.parallel.expert.padded import PaddedCarrier
from echelon.parallel.expert.router import Routed, Tokens
from echelon.parallel.expert.two_hop import TwoHopCarrier


class Dispatch:
    """Make carriers for the tokens of one rank."""

    def __init__(self, plan: Plan, groups: RankGroups) -> None:
        """Dispatch over the expert group of `groups`, as the layout of `plan` says."""
        experts = plan.model.experts
        assert experts is not None, "a dense model dispatches nothing"
        self._experts, self._balance = experts, plan.mathematics.balance
        self.layout, self._groups = plan.layout.experts, groups

    @property
    def num_ranks(self) -> int:
        """Return how many ranks the experts are on."""
        return self._groups.expert.size

    def carrier(self, routed: Routed, tokens: Tokens) -> Carrier:
        """Return the carrier of tokens that are routed so, some of those that `tokens` tells of."""
        num_experts, groups = self._experts.num_experts, self._groups
        if self.layout.dispatch == "two-hop":
            across, within = groups.expert_across, groups.expert_within
            return TwoHopCarrier(routed, num_experts, across, within)
        if not self.layout.padded:
            return FlatCarrier(routed, num_experts, groups.expert)
        room = self._balance.capacity(tokens.length, num_experts, self._experts.top_k)
        assert room is not None, "without a capacity there is no size to pad to"
        slots = slots_per_expert(len(routed.chosen_nK), tokens.num_sequences, room)
        return PaddedCarrier(routed, num_experts, groups.expert, slots)
