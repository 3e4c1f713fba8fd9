# SPDX-License-Identifier: Apache-2.0
"""Settings of experts: what holds of them, and the two records of a Plan that they become.

`config/rules/experts/` says what must hold.
"""

from __future__ import annotations

from typing import Literal, cast

from echelon.config.view import Unavailable, View, mesh_of, record
from echelon.core.axis import Axis
from echelon.core.experts import Balance, ExpertLayout

EP_KEY, EXPERT_TP_KEY, TP_KEY = "mesh.ep", "experts.expert_tp", "mesh.tp"
COUNT_KEY, FFN_KEY = "model.experts.num_experts", "model.experts.ffn"
BALANCE_KEY, CAPACITY_KEY = "experts.balance", "experts.capacity_factor"
BIAS_KEY = "model.experts.router_bias"
STAGE_KEY = "experts.zero_stage"
DROPLESS = "dropless"
HAS_BIAS = ("bias", "both")
"""Balances that move a bias of the router."""


def has_experts(view: View) -> bool:
    """Return whether the model has experts; Unavailable where a setting of them is wrong."""
    return view.has_table("model.experts")


def require_experts(view: View) -> None:
    """Raise Unavailable where there is nothing to check: the model has no experts."""
    if not has_experts(view):
        raise Unavailable("model.experts")


def has_dense_layers(view: View) -> bool:
    """Return whether some block has a dense MLP."""
    return not has_experts(view) or view.integer("model.experts.first_dense_layers") > 0


def shared_width(view: View) -> int:
    """Return the inner width of the experts that every token meets, one dense MLP; 0 for none."""
    if not has_experts(view):
        return 0
    return view.integer("model.experts.shared_experts") * view.integer(FFN_KEY)


def expert_tp(view: View) -> int:
    """Return into how many pieces an expert is cut; Unavailable where that cannot be."""
    degree = view.integer(EXPERT_TP_KEY)
    if degree not in (1, view.integer(TP_KEY)):
        raise Unavailable(EXPERT_TP_KEY)
    return degree


def expert_fold(view: View) -> tuple[Axis, ...]:
    """Return the axes over whose ranks experts are shared out, be their pieces right or not."""
    return mesh_of(view).expert_fold(expert_tp=view.integer(EXPERT_TP_KEY))


def fold_degree(view: View) -> int:
    """Return among how many ranks of one replica experts can be shared out."""
    return mesh_of(view).degree(*expert_fold(view))


def ranks_with_the_same_experts(view: View) -> int:
    """Return how many ranks of one replica hold the same experts; Unavailable where uneven."""
    ranks, ep = fold_degree(view), view.integer(EP_KEY)
    if ranks % ep:
        raise Unavailable(EP_KEY)
    return ranks // ep


def cuts_by_shard(view: View) -> bool:
    """Return whether experts make dp_shard another thing than dp_replicate.

    So it is where ep neighbours differ in it, and where ranks with the same experts share slices.
    """
    if not has_experts(view):
        return False
    inner = [axis for axis in expert_fold(view) if axis is not Axis.DP_SHARD]
    return expert_stage(view)[0] > 0 or mesh_of(view).degree(*inner) % view.integer(EP_KEY) != 0


def expert_stage(view: View) -> tuple[int, str]:
    """Return the ZeRO stage of experts, and where it comes from."""
    entry = view.entry(STAGE_KEY)
    if entry.value == "auto":
        return view.integer("zero.stage"), "derived: zero.stage"
    return cast(int, entry.value), entry.source


def tokens_of_microbatch(view: View) -> int:
    """Return the tokens of a microbatch on a context rank; Unavailable where they are uneven."""
    length, cp = view.integer("batch.sequence_length"), view.integer("mesh.cp")
    if length % cp:
        raise Unavailable("mesh.cp")
    return view.integer("batch.microbatch_sequences") * (length // cp)


def capacity_factor(view: View) -> float | None:
    """Return the capacity factor; None where nothing is dropped."""
    return None if view.entry(CAPACITY_KEY).value == DROPLESS else view.number(CAPACITY_KEY)


def read_balance(view: View) -> Balance:
    """Return what keeps experts busy."""
    return record(view, Balance, "experts")


def read_expert_layout(view: View) -> tuple[ExpertLayout, dict[str, tuple[object, str]]]:
    """Return how experts are split, and value and source of what was left to us."""
    if not has_experts(view):
        return ExpertLayout(), {}
    stage, source = expert_stage(view)
    derived: dict[str, tuple[object, str]] = {}
    if view.entry(STAGE_KEY).value == "auto":
        derived[STAGE_KEY] = stage, source
    zero_stage = cast(Literal[0, 1, 2, 3], stage)
    return record(view, ExpertLayout, "experts", zero_stage=zero_stage), derived
