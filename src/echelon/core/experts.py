# SPDX-License-Identifier: Apache-2.0
"""How experts are kept busy, and how they are laid out: two records of a Plan.

`Balance` changes the numbers of a run, `ExpertLayout` only its speed and memory. None of the
quantities of `Balance` depends on how ranks share the work, but for "microbatch", which says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

from echelon.core.settings.configured import Configured
from echelon.core.settings.value_types import DEGREE, Integer, Real

BalanceKind = Literal["none", "aux", "bias", "both"]
AuxiliaryScope = Literal["global", "sequence", "microbatch"]
DropRule = Literal["position", "score"]
RouteKind = Literal["scores", "even", "one", "not-last"]
DispatchKind = Literal["flat", "two-hop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Say what keeps the load of experts even, and what happens to tokens beyond their room.

    "aux" adds `aux_coefficient` x E x sum of f P to the loss of each layer (Switch Transformer,
    2021, section 2.2): f is the share of assignments that an expert gets, P its mean probability.
    P is of this step; f is that of each sequence (DeepSeek-V3, section 2.1.2), of each microbatch,
    or of the whole global batch: of the one before, for this one's is not known before backward
    begins. "bias" adds a bias to the scores by which experts are chosen, and moves it by
    `bias_rate` against the load of the whole global batch after each step; "both" does both.
    `z_coefficient` is that of the mean square of the router's log-sum-exp (ST-MoE, 2022).

    With a `capacity_factor` c an expert has room for ceil(c T k / E) tokens of each sequence of T;
    what comes after ("position"), or scores lower ("score"), is dropped.
    `route` is for benchmarks and proofs: where tokens go, whatever their scores: in turn to each
    expert ("even"), all to the first ones ("one"), none to the last one ("not-last").
    """

    kind: Annotated[
        BalanceKind,
        Configured("what keeps loads even: a loss, a bias of the choice, or both", name="balance"),
    ] = "none"
    aux_coefficient: Annotated[float, Configured("with aux: of the loss for even loads")] = 0.01
    aux_over: Annotated[
        AuxiliaryScope, Configured("with aux: over which tokens loads are to be even")
    ] = "global"
    z_coefficient: Annotated[float, Configured("of the loss for small router logits", Real())] = 0.0
    bias_rate: Annotated[
        float, Configured("with bias: how far it moves after a step", after="aux_over")
    ] = 0.001
    capacity_factor: Annotated[
        float | None,
        Configured(
            "room of an expert in each sequence: times its even share",
            Real(above=True, words=("dropless",)),
            default="dropless",
        ),
    ] = None
    drop: Annotated[
        DropRule, Configured("with a capacity: what is dropped, later tokens or lower scores")
    ] = "position"
    route: Annotated[
        RouteKind, Configured("for benchmarks and proofs: where tokens go whatever their scores")
    ] = "scores"

    @property
    def has_aux(self) -> bool:
        """Return whether the loss has a term for the load."""
        return self.kind in ("aux", "both")

    @property
    def has_bias(self) -> bool:
        """Return whether a bias follows the load."""
        return self.kind in ("bias", "both")

    @property
    def counts_first(self) -> bool:
        """Return whether ranks that share sequences count their assignments in each forward."""
        return self.has_aux and self.aux_over != "global"

    def capacity(self, length: int, num_experts: int, top_k: int) -> int | None:
        """Return the room of an expert for tokens of one sequence; None where it has no end."""
        if self.capacity_factor is None:
            return None
        return ceil(unrounded_capacity(self.capacity_factor, length, num_experts, top_k))


def unrounded_capacity(factor: float, length: int, num_experts: int, top_k: int) -> float:
    """Return the room of an expert in tokens of a sequence, before it is rounded up."""
    # Rounded here: 1.1 x 50 is not to be 56 because of the last bit of 1.1.
    return round(factor * length * top_k / num_experts, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Say how experts are split and how tokens travel to them.

    Each expert is cut into `expert_tp` pieces: 1, or as many as there are tensor ranks. What of
    expert parameters the ranks with the same experts share out, `zero_stage` says (`Zero.stage`
    for all others). Tokens go straight to the ranks of their experts ("flat"), or first to one
    rank of each node that they reach ("two-hop"); in `chunks` that overlap; `padded` to a size
    that does not depend on the routing, which needs a capacity.
    """

    expert_tp: Annotated[int, Configured("pieces of one expert: 1, or as many as tp", DEGREE)] = 1
    zero_stage: Annotated[
        Literal[0, 1, 2, 3],
        Configured(
            "what ranks with the same experts share out; auto: zero.stage",
            Integer(minimum=0, maximum=3, words=("auto",)),
            default="auto",
        ),
    ] = 0
    dispatch: Annotated[DispatchKind, Configured("two-hop: a token crosses to a node once")] = (
        "flat"
    )
    chunks: Annotated[int, Configured("parts of a microbatch that travel one by one")] = 1
    padded: Annotated[bool, Configured("with a capacity: sizes do not depend on the routing")] = (
        False
    )
