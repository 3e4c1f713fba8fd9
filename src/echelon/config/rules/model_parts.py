# SPDX-License-Identifier: Apache-2.0
"""What must hold of the experts of a model, and of its latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.rules.suggestions import by_distance, near_divisors, setting_changes
from echelon.config.rules.violations import RuleViolation
from echelon.config.settings.experts import COUNT_KEY, require_experts
from echelon.config.settings.value_types import toml_text
from echelon.config.view import Unavailable, View
from echelon.core.rulebook.experts import (
    EXPERTS_ARE_GATED,
    EXPERTS_HAVE_NO_BIAS,
    GROUPS_DIVIDE_EXPERTS,
    RENORMALISED_GATES_DIFFER,
    TOP_GROUPS_HOLD_TOP_K,
)
from echelon.core.rulebook.model import (
    LATENT_ATTENTION_IS_PLAIN,
    LATENT_HEAD_HAS_TWO_PARTS,
    LATENT_HEADS_HAVE_KEYS,
    LATENT_POSITIONS_ARE_ROTARY,
    LATENT_VALUE_FITS_KEY,
)

GROUPS_KEY, TOP_GROUPS_KEY = "model.experts.groups", "model.experts.top_groups"
TOP_K_KEY, SUM_KEY = "model.experts.top_k", "model.experts.renormalise"
HEAD_DIM_KEY, PARTS = "model.head_dim", ("model.latent.nope_dim", "model.latent.rope_dim")
VALUE_DIM_KEY = "model.latent.value_dim"
LEAST_IN_GROUP = 2  # experts


def groups_divide_experts(view: View) -> Iterator[RuleViolation]:
    """Find groups of unequal size, or of one expert."""
    require_experts(view)
    groups, count = view.integer(GROUPS_KEY), view.integer(COUNT_KEY)
    if _even(groups, count):
        return
    if count % groups:
        why = f"({count} % {groups} = {count % groups})"
    else:
        why = f"({count} / {groups} = {count // groups} in each, and a group needs two)"
    yield RuleViolation(
        rule=GROUPS_DIVIDE_EXPERTS,
        key=GROUPS_KEY,
        message=f"{GROUPS_KEY} = {groups}, but {view.model_name} has num_experts = {count} {why}",
        set_by=(GROUPS_KEY, COUNT_KEY),
        suggestions=(setting_changes(GROUPS_KEY, near_divisors(count, groups)),),
    )


def _even(groups: int, count: int) -> bool:
    return groups == 1 or (count % groups == 0 and count // groups >= LEAST_IN_GROUP)


def top_groups_hold_top_k(view: View) -> Iterator[RuleViolation]:
    """Find a choice of more groups than there are, or of fewer experts than a token meets."""
    require_experts(view)
    names = (GROUPS_KEY, TOP_GROUPS_KEY, TOP_K_KEY, COUNT_KEY)
    groups, top, top_k, count = (view.integer(name) for name in names)
    if not _even(groups, count):
        raise Unavailable(GROUPS_KEY)
    held = top * count // groups
    if top <= groups and (top_k <= held or top_k > count):
        return
    if top > groups:
        message = f"{TOP_GROUPS_KEY} = {top} is more than groups = {groups}"
    else:
        message = (
            f"{TOP_K_KEY} = {top_k}, but {TOP_GROUPS_KEY} = {top} of {groups} groups hold {top} x "
            f"{count} / {groups} = {held} experts"
        )
    yield RuleViolation(
        rule=TOP_GROUPS_HOLD_TOP_K,
        key=TOP_GROUPS_KEY,
        message=message,
        set_by=(TOP_GROUPS_KEY, GROUPS_KEY, TOP_K_KEY),
        suggestions=(
            setting_changes(TOP_GROUPS_KEY, by_distance(range(1, groups + 1), top)),
            setting_changes(GROUPS_KEY, near_divisors(count, groups)),
            setting_changes(TOP_K_KEY, [held] if held < top_k else []),
        ),
    )


def renormalised_gates_differ(view: View) -> Iterator[RuleViolation]:
    """Find a weight that is 1 whatever the score, from which a router cannot learn."""
    require_experts(view)
    if view.integer(TOP_K_KEY) == 1 and view.flag(SUM_KEY):
        yield RuleViolation(
            rule=RENORMALISED_GATES_DIFFER,
            key=SUM_KEY,
            message=f"{SUM_KEY} = true, but {TOP_K_KEY} = 1: the weight of the only expert of a "
            "token is 1 whatever its score, and the router gets no gradient from the loss",
            set_by=(SUM_KEY, TOP_K_KEY),
            suggestions=({SUM_KEY: False}, {TOP_K_KEY: 2}),
        )


def experts_are_gated(view: View) -> Iterator[RuleViolation]:
    """Find experts of two matrices."""
    require_experts(view)
    if not view.flag("model.gated"):
        yield RuleViolation(
            rule=EXPERTS_ARE_GATED,
            key="model.gated",
            message=f"model.gated = false, but {view.model_name} has experts, and those have a "
            "gate (SwiGLU)",
            suggestions=([{"model.gated": True, "model.activation": "silu"}],),
        )


def experts_have_no_bias(view: View) -> Iterator[RuleViolation]:
    """Find experts with biases in their matrices."""
    require_experts(view)
    if view.flag("model.mlp_bias"):
        yield RuleViolation(
            rule=EXPERTS_HAVE_NO_BIAS,
            key="model.mlp_bias",
            message=f"model.mlp_bias = true, but {view.model_name} has experts, whose biases are "
            "model.experts.bias",
            suggestions=({"model.mlp_bias": False},),
        )


def latent_heads_have_keys(view: View) -> Iterator[RuleViolation]:
    """Find heads of latent attention that are to share keys."""
    _require_latent(view)
    heads, kv_heads = view.integer("model.heads"), view.integer("model.kv_heads")
    if heads != kv_heads:
        yield RuleViolation(
            rule=LATENT_HEADS_HAVE_KEYS,
            key="model.kv_heads",
            message=f"model.kv_heads = {kv_heads}, but in latent attention each of "
            f"model.heads = {heads} has keys of its own",
            set_by=("model.kv_heads", "model.heads"),
            suggestions=({"model.kv_heads": heads},),
        )


def latent_head_has_two_parts(view: View) -> Iterator[RuleViolation]:
    """Find a width of heads that is not that of their two parts."""
    _require_latent(view)
    width, (nope, rope) = view.integer(HEAD_DIM_KEY), (view.integer(key) for key in PARTS)
    if width != nope + rope:
        yield RuleViolation(
            rule=LATENT_HEAD_HAS_TWO_PARTS,
            key=HEAD_DIM_KEY,
            message=f"{HEAD_DIM_KEY} = {width}, but a latent head has nope_dim + rope_dim = "
            f"{nope} + {rope} = {nope + rope} dims",
            set_by=(HEAD_DIM_KEY, *PARTS),
            suggestions=(
                {HEAD_DIM_KEY: nope + rope},
                setting_changes(PARTS[0], [width - rope] if width > rope else []),
            ),
        )


def latent_value_fits_key(view: View) -> Iterator[RuleViolation]:
    """Find values that are wider than keys."""
    _require_latent(view)
    value, (nope, rope) = view.integer(VALUE_DIM_KEY), (view.integer(key) for key in PARTS)
    if value > nope + rope:
        yield RuleViolation(
            rule=LATENT_VALUE_FITS_KEY,
            key=VALUE_DIM_KEY,
            message=f"{VALUE_DIM_KEY} = {value}, but a key has nope_dim + rope_dim = {nope} + "
            f"{rope} = {nope + rope} dims, and a value has no more",
            set_by=(VALUE_DIM_KEY, *PARTS),
            suggestions=({VALUE_DIM_KEY: nope + rope},),
        )


def latent_positions_are_rotary(view: View) -> Iterator[RuleViolation]:
    """Find latent attention without rotary positions."""
    _require_latent(view)
    kind = view.word("model.positions")
    if kind != "rope":
        yield RuleViolation(
            rule=LATENT_POSITIONS_ARE_ROTARY,
            key="model.positions",
            message=f"model.positions = {toml_text(kind)}, but in latent attention they enter by "
            f"the {view.integer(PARTS[1])} rotary dims of a head",
            set_by=("model.positions", PARTS[1]),
            suggestions=({"model.positions": "rope"},),
        )


def latent_attention_is_plain(view: View) -> Iterator[RuleViolation]:
    """Find biases, or norms of each head, which latent attention does not have."""
    _require_latent(view)
    for name in ("qkv_bias", "output_bias", "qk_norm"):
        key = f"model.{name}"
        if view.flag(key):
            yield RuleViolation(
                rule=LATENT_ATTENTION_IS_PLAIN,
                key=key,
                message=f"{key} = true, which latent attention does not have",
                set_by=(key, "model.latent.kv_rank"),
                suggestions=({key: False},),
            )


def _require_latent(view: View) -> None:
    if not view.has_table("model.latent"):
        raise Unavailable("model.latent")


PART_FINDERS = (
    groups_divide_experts,
    top_groups_hold_top_k,
    renormalised_gates_differ,
    experts_are_gated,
    experts_have_no_bias,
    latent_heads_have_keys,
    latent_head_has_two_parts,
    latent_value_fits_key,
    latent_positions_are_rotary,
    latent_attention_is_plain,
)
