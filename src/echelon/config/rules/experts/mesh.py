# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which experts: what must hold of mesh.ep, experts.expert_tp and the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from echelon.config.rules.suggestions import (
    SettingChanges,
    by_distance,
    near_divisors,
    setting_changes,
)
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.experts import (
    COUNT_KEY,
    EP_KEY,
    EXPERT_TP_KEY,
    FFN_KEY,
    TP_KEY,
    expert_fold,
    expert_tp,
    fold_degree,
    has_experts,
    require_experts,
    tokens_of_microbatch,
)
from echelon.config.view import View, mesh_of
from echelon.core.axis import Axis
from echelon.core.rulebook.experts import (
    EP_DIVIDES_EXPERTS,
    EP_DIVIDES_RANKS,
    EXPERT_TP_DIVIDES_FFN,
    EXPERT_TP_IS_ONE_OR_TP,
    TP_DIVIDES_TOKENS,
)

SHARD_KEY, REPLICATE_KEY = "mesh.dp_shard", "mesh.dp_replicate"
SIZE_KEY, LENGTH_KEY = "batch.microbatch_sequences", "batch.sequence_length"


def ep_without_experts(view: View) -> Iterator[RuleViolation]:
    """Find a degree of expert parallelism of a dense model."""
    if not has_experts(view):
        yield from setting_without_effect(view, EP_KEY, f"{view.model_name} has no experts")


def ep_divides_experts(view: View) -> Iterator[RuleViolation]:
    """Find experts that ep ranks cannot share out evenly."""
    require_experts(view)
    ep, count = view.integer(EP_KEY), view.integer(COUNT_KEY)
    if count % ep:
        below = count - count % ep
        yield RuleViolation(
            rule=EP_DIVIDES_EXPERTS,
            key=EP_KEY,
            message=f"{EP_KEY} = {ep}, but {view.model_name} has num_experts = {count} "
            f"({count} % {ep} = {count % ep})",
            set_by=(EP_KEY, COUNT_KEY),
            suggestions=(
                _degrees(view),
                setting_changes(COUNT_KEY, (n for n in (below, below + ep) if n > 1)),
            ),
        )


def ep_divides_ranks(view: View) -> Iterator[RuleViolation]:
    """Find a degree that the ranks over which experts are shared out do not have room for."""
    require_experts(view)
    ep, ranks, fold = view.integer(EP_KEY), fold_degree(view), expert_fold(view)
    if ranks % ep == 0:
        return
    mesh = mesh_of(view)
    names = " x ".join(f"mesh.{axis.value}" for axis in fold)
    degrees = " x ".join(str(mesh.degree(axis)) for axis in fold)
    why = ""
    if mesh.dp_replicate > 1 and ranks * mesh.dp_replicate % ep == 0:
        why = f"; {REPLICATE_KEY} = {mesh.dp_replicate} holds copies and is no part of it"
    if Axis.TP not in fold and ranks * mesh.tp % ep == 0:
        why = f"; {EXPERT_TP_KEY} = {mesh.tp} cuts each expert over {TP_KEY}, no part of it"
    yield RuleViolation(
        rule=EP_DIVIDES_RANKS,
        key=EP_KEY,
        message=f"{EP_KEY} = {ep} does not divide {names} = {degrees} = {ranks}, the ranks that "
        f"share out experts ({ranks} % {ep} = {ranks % ep}){why}",
        set_by=(EP_KEY, *(f"mesh.{axis.value}" for axis in (Axis.DP_REPLICATE, *fold))),
        suggestions=(_other_shards(view), {EXPERT_TP_KEY: 1}, _degrees(view)),
    )


def _degrees(view: View) -> Iterator[SettingChanges]:
    """Yield degrees that divide both the experts and the ranks that share them out."""
    both = gcd(view.integer(COUNT_KEY), fold_degree(view))
    return setting_changes(EP_KEY, near_divisors(both, view.integer(EP_KEY)))


def _other_shards(view: View) -> Iterator[SettingChanges]:
    """Yield meshes with more ranks in a replica: of those that there are, else more of them."""
    ep, replicas, shards = (view.integer(k) for k in (EP_KEY, REPLICATE_KEY, SHARD_KEY))
    missing = ep // gcd(ep, fold_degree(view))
    if replicas % missing == 0:
        yield {SHARD_KEY: shards * missing, REPLICATE_KEY: replicas // missing}
    else:
        yield {SHARD_KEY: shards * missing}


def expert_tp_is_one_or_tp(view: View) -> Iterator[RuleViolation]:
    """Find experts that are cut into another number of pieces than there are tensor ranks."""
    require_experts(view)
    pieces, tp = view.integer(EXPERT_TP_KEY), view.integer(TP_KEY)
    if pieces not in (1, tp):
        why = f"an expert is whole on a tensor rank (1), or each has a piece of it ({tp})"
        if tp == 1:
            why = "without other tensor ranks an expert is whole (1)"
        yield RuleViolation(
            rule=EXPERT_TP_IS_ONE_OR_TP,
            key=EXPERT_TP_KEY,
            message=f"{EXPERT_TP_KEY} = {pieces}, but {TP_KEY} = {tp}: {why}",
            set_by=(EXPERT_TP_KEY, TP_KEY),
            suggestions=(setting_changes(EXPERT_TP_KEY, dict.fromkeys((1, tp))), {TP_KEY: pieces}),
        )


def expert_tp_divides_ffn(view: View) -> Iterator[RuleViolation]:
    """Find experts whose inner width their pieces do not divide."""
    require_experts(view)
    pieces, ffn = expert_tp(view), view.integer(FFN_KEY)
    if ffn % pieces:
        fewer = near_divisors(ffn, pieces)
        yield RuleViolation(
            rule=EXPERT_TP_DIVIDES_FFN,
            key=EXPERT_TP_KEY,
            message=f"{EXPERT_TP_KEY} = {pieces}, but {view.model_name} has experts.ffn = {ffn} "
            f"({ffn} % {pieces} = {ffn % pieces})",
            set_by=(EXPERT_TP_KEY, FFN_KEY),
            suggestions=(
                {EXPERT_TP_KEY: 1},
                ({EXPERT_TP_KEY: n, TP_KEY: n} for n in fewer if n > 1),
                setting_changes(
                    FFN_KEY, (n for n in (ffn - ffn % pieces, ffn + -ffn % pieces) if n)
                ),
            ),
        )


def tp_divides_tokens(view: View) -> Iterator[RuleViolation]:
    """Find tokens of a microbatch that tensor ranks cannot route in equal parts."""
    require_experts(view)
    tp, tokens = view.integer(TP_KEY), tokens_of_microbatch(view)
    if tokens % tp == 0 or view.flag("mesh.sequence_parallel"):
        return
    size, length, cp = (view.integer(k) for k in (SIZE_KEY, LENGTH_KEY, "mesh.cp"))
    step = tp // gcd(tp, length // cp)
    longer = lcm(cp * tp // gcd(tp, size), 2 * cp)
    yield RuleViolation(
        rule=TP_DIVIDES_TOKENS,
        key=TP_KEY,
        message=f"{TP_KEY} = {tp}, but a microbatch has microbatch_sequences x sequence_length / "
        f"cp = {size} x {length} / {cp} = {tokens} tokens ({tokens} % {tp} = {tokens % tp}), and "
        "each tensor rank routes an equal part of them",
        set_by=(TP_KEY, SIZE_KEY, LENGTH_KEY),
        suggestions=(
            setting_changes(SIZE_KEY, by_distance(range(step, 65 * step, step), size)),
            setting_changes(
                LENGTH_KEY, by_distance(range(longer, length + 2 * longer, longer), length)
            ),
            setting_changes(TP_KEY, near_divisors(tokens, tp)),
        ),
    )


EXPERT_MESH_FINDERS = (
    ep_without_experts,
    ep_divides_experts,
    ep_divides_ranks,
    expert_tp_is_one_or_tp,
    expert_tp_divides_ffn,
    tp_divides_tokens,
)
