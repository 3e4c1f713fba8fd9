# SPDX-License-Identifier: Apache-2.0
"""Rules of experts: ranks that hold them, tokens that travel, capacity and balance."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, gcd, lcm

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.experts import (
    BALANCE_KEY,
    BIAS_KEY,
    CAPACITY_KEY,
    COUNT_KEY,
    DROPLESS,
    EP_KEY,
    EXPERT_TP_KEY,
    FFN_KEY,
    HAS_BIAS,
    STAGE_KEY,
    TP_KEY,
    capacity_factor,
    expert_fold,
    expert_tp,
    fold_degree,
    has_experts,
    ranks_with_the_same_experts,
    require_experts,
    tokens_of_microbatch,
)
from echelon.config.rules.violations import (
    RuleViolation,
    SettingChanges,
    by_distance,
    near_divisors,
    setting_changes,
    setting_without_effect,
)
from echelon.config.schema import SETTINGS
from echelon.config.view import Unavailable, View, mesh_of
from echelon.core.axis import Axis
from echelon.core.experts import unrounded_capacity
from echelon.core.mesh import Mesh, expert_groups
from echelon.core.rulebook.experts import (
    BIAS_BALANCE_HAS_BIAS,
    CAPACITY_HOLDS_TOKENS,
    CHUNKS_DIVIDE_TOKENS,
    EP_DIVIDES_EXPERTS,
    EP_DIVIDES_RANKS,
    EXPERT_TP_DIVIDES_FFN,
    EXPERT_TP_IS_ONE_OR_TP,
    PADDED_NEEDS_CAPACITY,
    PADDED_TRAVELS_FLAT,
    TP_DIVIDES_TOKENS,
    TWO_HOP_NEEDS_NODES,
)

SHARD_KEY, REPLICATE_KEY = "mesh.dp_shard", "mesh.dp_replicate"
SIZE_KEY, LENGTH_KEY = "batch.microbatch_sequences", "batch.sequence_length"
DISPATCH_KEY, CHUNKS_KEY, PADDED_KEY = "experts.dispatch", "experts.chunks", "experts.padded"
TWO_HOP = "two-hop"
TOP_K_KEY, DROP_KEY = "model.experts.top_k", "experts.drop"
HAS_AUX = ("aux", "both")
EXPERT_KEYS = tuple(key for key in SETTINGS if key.startswith("experts."))


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
        yield RuleViolation(
            rule=EXPERT_TP_DIVIDES_FFN,
            key=EXPERT_TP_KEY,
            message=f"{EXPERT_TP_KEY} = {pieces}, but {view.model_name} has experts.ffn = {ffn} "
            f"({ffn} % {pieces} = {ffn % pieces})",
            set_by=(EXPERT_TP_KEY, FFN_KEY),
            suggestions=(
                {EXPERT_TP_KEY: 1},
                ({EXPERT_TP_KEY: n, TP_KEY: n} for n in near_divisors(ffn, pieces) if n > 1),
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


def padding_violations(view: View) -> Iterator[RuleViolation]:
    """Find padding without a size to pad to, and padding of what travels in two hops."""
    require_experts(view)
    if not view.flag(PADDED_KEY):
        return
    if capacity_factor(view) is None:
        yield RuleViolation(
            rule=PADDED_NEEDS_CAPACITY,
            key=PADDED_KEY,
            message=f'{PADDED_KEY} = true, but {CAPACITY_KEY} = "{DROPLESS}" has no size to pad to',
            set_by=(PADDED_KEY, CAPACITY_KEY),
            suggestions=({CAPACITY_KEY: 1.25}, {PADDED_KEY: False}),
        )
    if view.word(DISPATCH_KEY) == TWO_HOP:
        yield RuleViolation(
            rule=PADDED_TRAVELS_FLAT,
            key=PADDED_KEY,
            message=f'{PADDED_KEY} = true with {DISPATCH_KEY} = "two-hop": what crosses between '
            "nodes follows from the routing, and has no fixed size",
            set_by=(PADDED_KEY, DISPATCH_KEY),
            suggestions=({DISPATCH_KEY: "flat"}, {PADDED_KEY: False}),
        )


def two_hop_violations(view: View) -> Iterator[RuleViolation]:
    """Find two hops where there is nothing to cross, or nothing to hand on."""
    require_experts(view)
    if view.word(DISPATCH_KEY) != TWO_HOP:
        return
    ranks_with_the_same_experts(view)  # Without whole groups there are no nodes to look at.
    node = cluster_of(view).devices_per_node
    why = two_hop_obstacle(mesh_of(view), view.integer(EXPERT_TP_KEY), node)
    if why:
        yield RuleViolation(
            rule=TWO_HOP_NEEDS_NODES,
            key=DISPATCH_KEY,
            message=f'{DISPATCH_KEY} = "two-hop", but {why}',
            set_by=(DISPATCH_KEY, EP_KEY),
            suggestions=(_degrees(view), {DISPATCH_KEY: "flat"}),
        )


def two_hop_obstacle(mesh: Mesh, pieces: int, node: int) -> str:
    """Return why two hops make no sense over the expert groups of a mesh; nothing where they do."""
    if mesh.ep == 1:
        return f"{EP_KEY} = 1 sends nothing"
    groups = expert_groups(mesh, pieces)
    fold = mesh.degree(*mesh.expert_fold(expert_tp=pieces)) * groups.stride
    order = sorted(groups.starts(node), key=lambda start: (start // fold, start % groups.stride))
    for start in order:
        last = start + groups.stride * (mesh.ep - 1)
        ranks = f"the {mesh.ep} ranks from {start} to {last} that share out experts"
        even = groups.even_on_nodes(start, node)
        if even == mesh.ep:
            return f"{ranks} are on one node of {node} devices"
        if even == 0:
            counts = " + ".join(map(str, groups.counts_on_nodes(start, node)))
            return f"{ranks} are spread unevenly over nodes of {node} devices: {counts}"
        if even == 1:
            return f"of {ranks} each is on a node of its own: there is no second hop"
    return ""


def chunk_violations(view: View) -> Iterator[RuleViolation]:
    """Find chunks of unequal size, or of what does not travel."""
    require_experts(view)
    count = view.integer(CHUNKS_KEY)
    if view.integer(EP_KEY) == 1:
        yield from setting_without_effect(view, CHUNKS_KEY, f"tokens do not travel, {EP_KEY} = 1")
        return
    tokens = tokens_of_microbatch(view)
    parts = view.integer(TP_KEY) if view.integer(EXPERT_TP_KEY) == 1 else 1
    if tokens % parts:
        raise Unavailable(TP_KEY)
    rows = tokens // parts
    if rows % count:
        how = f"the {tokens} tokens of a microbatch"
        if parts > 1:
            how = f"{tokens} tokens of a microbatch / tp = {tokens} / {parts} = {rows}"
        yield RuleViolation(
            rule=CHUNKS_DIVIDE_TOKENS,
            key=CHUNKS_KEY,
            message=f"{CHUNKS_KEY} = {count}, but a rank sends {how} to experts "
            f"({rows} % {count} = {rows % count})",
            set_by=(CHUNKS_KEY, "batch.microbatch_sequences", "batch.sequence_length", TP_KEY),
            suggestions=(setting_changes(CHUNKS_KEY, near_divisors(rows, count)),),
        )


DISPATCH_FINDERS = (padding_violations, two_hop_violations, chunk_violations)


def capacity_holds_tokens(view: View) -> Iterator[RuleViolation]:
    """Find a capacity of less than a token, which drops nearly everything."""
    require_experts(view)
    factor = capacity_factor(view)
    if factor is None:
        return
    length, top_k, count = (view.integer(k) for k in (LENGTH_KEY, TOP_K_KEY, COUNT_KEY))
    held = unrounded_capacity(factor, length, count, top_k)
    if held < 1:
        least = ceil(100 * count / (length * top_k)) / 100
        yield RuleViolation(
            rule=CAPACITY_HOLDS_TOKENS,
            key=CAPACITY_KEY,
            message=f"{CAPACITY_KEY} = {factor:g} gives an expert room for {factor:g} x "
            f"sequence_length x top_k / num_experts = {factor:g} x {length} x {top_k} / {count} = "
            f"{held:g} tokens of a sequence, which is less than one",
            set_by=(CAPACITY_KEY, LENGTH_KEY, TOP_K_KEY, COUNT_KEY),
            suggestions=(
                setting_changes(CAPACITY_KEY, dict.fromkeys((least, max(least, 1.0)))),
                {CAPACITY_KEY: DROPLESS},
            ),
        )


def bias_balance_has_bias(view: View) -> Iterator[RuleViolation]:
    """Find a balance by a bias that the router is said not to have.

    Where nobody says so, it follows from the balance.
    """
    require_experts(view)
    said = BIAS_KEY in view.entries and not view.flag(BIAS_KEY)
    if view.word(BALANCE_KEY) in HAS_BIAS and said:
        yield RuleViolation(
            rule=BIAS_BALANCE_HAS_BIAS,
            key=BIAS_KEY,
            message=f'{BALANCE_KEY} = "{view.word(BALANCE_KEY)}" moves a bias of the router, but '
            f"{BIAS_KEY} = false leaves it out",
            set_by=(BIAS_KEY, BALANCE_KEY),
            suggestions=({BIAS_KEY: True}, {BALANCE_KEY: "aux"}),
        )


def expert_settings_of_dense_model(view: View) -> Iterator[RuleViolation]:
    """Find settings of experts of a model that has none."""
    if not has_experts(view):
        for key in EXPERT_KEYS:
            if key not in view.wrong:
                yield from setting_without_effect(view, key, f"{view.model_name} has no experts")


def balance_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find settings of a balance, or of drops, that there is not."""
    require_experts(view)
    balance = view.word(BALANCE_KEY)
    told = f'{BALANCE_KEY} = "{balance}"'
    if balance not in HAS_AUX:
        for name in ("aux_coefficient", "aux_over"):
            yield from setting_without_effect(
                view, f"experts.{name}", f"{told} adds no loss", _also(view, "aux")
            )
    if balance not in HAS_BIAS:
        yield from setting_without_effect(
            view, "experts.bias_rate", f"{told} moves no bias", _also(view, "bias")
        )
    if capacity_factor(view) is None:
        why = f'nothing is dropped, {CAPACITY_KEY} = "{DROPLESS}"'
        yield from setting_without_effect(view, DROP_KEY, why, {CAPACITY_KEY: 1.25})


def capacity_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find a capacity for all tokens of a sequence; padded it still says to what size."""
    require_experts(view)
    factor = capacity_factor(view)
    if factor is None or view.flag(PADDED_KEY):
        return
    length, top_k, count = (view.integer(k) for k in (LENGTH_KEY, TOP_K_KEY, COUNT_KEY))
    held = ceil(unrounded_capacity(factor, length, count, top_k))
    if held >= length:
        why = f"an expert has room for {held} tokens of a sequence, and there are {length}"
        both = {CAPACITY_KEY: DROPLESS, DROP_KEY: "position"}
        ways = [] if view.is_default(DROP_KEY) else [both]
        yield from setting_without_effect(view, CAPACITY_KEY, why, *ways)


def _also(view: View, kind: str) -> dict[str, object]:
    return {BALANCE_KEY: kind if view.word(BALANCE_KEY) == "none" else "both"}


def expert_stage_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find a ZeRO stage of experts where no two ranks of a replica hold the same ones."""
    require_experts(view)
    if ranks_with_the_same_experts(view) == 1:
        why = "no two ranks of a replica hold the same experts, and nothing is shared out"
        # A resolved file has what "auto" was.
        yield from setting_without_effect(
            view, STAGE_KEY, why, allowed=(0, view.integer("zero.stage"))
        )


BALANCE_FINDERS = (capacity_holds_tokens, bias_balance_has_bias)
BALANCE_EFFECT_FINDERS = (
    expert_settings_of_dense_model,
    balance_settings_without_effect,
    capacity_without_effect,
    expert_stage_without_effect,
)
