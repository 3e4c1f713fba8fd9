# SPDX-License-Identifier: Apache-2.0
"""Rules of a model: heads, positions, vocabulary, experts, latent attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from echelon.config.derived.experts import COUNT_KEY, require_experts
from echelon.config.rules.violations import (
    RuleViolation,
    by_distance,
    near_divisors,
    setting_changes,
)
from echelon.config.view import Unavailable, View
from echelon.core.rulebook.config import NOT_BUILT_YET
from echelon.core.rulebook.experts import (
    EXPERTS_ARE_GATED,
    EXPERTS_HAVE_NO_BIAS,
    GROUPS_DIVIDE_EXPERTS,
    RENORMALISED_GATES_DIFFER,
    TOP_GROUPS_HOLD_TOP_K,
)
from echelon.core.rulebook.model import (
    ASSUME_WITHOUT_EFFECT,
    EXPERTS_ENOUGH,
    HEADS_DIVIDE_HIDDEN,
    KV_HEADS_DIVIDE_HEADS,
    LATENT_ATTENTION_IS_PLAIN,
    LATENT_HEAD_HAS_TWO_PARTS,
    LATENT_HEADS_HAVE_KEYS,
    LATENT_POSITIONS_ARE_ROTARY,
    LATENT_VALUE_FITS_KEY,
    ROPE_NEEDS_EVEN_HEAD,
    ROPE_SCALING_FACTORS,
    ROPE_SCALING_ORDER,
    VOCABULARY_HOLDS_TOKENIZER,
)
from echelon.core.rules import nearest_divisors
from echelon.core.settings.value_types import toml_text

BYTES_VOCABULARY = 257  # 256 bytes, and the end of a document: training/data/tokenizer.py


def heads_divide_hidden(view: View) -> Iterator[RuleViolation]:
    """Check that the width of a head is a whole number."""
    hidden, heads = view.integer("model.hidden"), view.integer("model.heads")
    if not view.has("model.head_dim") and hidden % heads:
        below = hidden - hidden % (2 * heads)  # An even head, so that rotary positions fit too.
        yield RuleViolation(
            rule=HEADS_DIVIDE_HIDDEN,
            message=f"model.hidden = {hidden} is not a multiple of model.heads = {heads} "
            f"({hidden} % {heads} = {hidden % heads}), and model.head_dim is not set",
            key="model.hidden",
            set_by=("model.hidden", "model.heads"),
            suggestions=[
                *(f"hidden = {n}" for n in (below, below + 2 * heads) if n > 0),
                *(f"heads = {n}" for n in _heads_that_fit(view, hidden, heads)),
            ],
        )


def _heads_that_fit(view: View, hidden: int, heads: int) -> list[int]:
    """Return up to two numbers of heads near this one: even in width, shared by the KV heads."""
    set_kv = view.has("model.kv_heads") and view.integer("model.kv_heads") != heads
    kv_heads = view.integer("model.kv_heads") if set_kv else 1
    near = sorted(nearest_divisors(hidden, heads, limit=8), key=lambda n: abs(n - heads))
    return sorted([n for n in near if hidden // n % 2 == 0 and n % kv_heads == 0][:2])


def kv_heads_divide_heads(view: View) -> Iterator[RuleViolation]:
    """Check that each key/value head serves as many query heads as the others."""
    heads, kv_heads = view.integer("model.heads"), view.integer("model.kv_heads")
    if heads % kv_heads:
        yield RuleViolation(
            rule=KV_HEADS_DIVIDE_HEADS,
            message=f"model.kv_heads = {kv_heads} does not divide model.heads = {heads} "
            f"({heads} % {kv_heads} = {heads % kv_heads})",
            key="model.kv_heads",
            set_by=("model.kv_heads", "model.heads"),
            suggestions=nearest_divisors(heads, kv_heads),
        )


def rope_needs_even_head(view: View) -> Iterator[RuleViolation]:
    """Check that rotary positions find pairs of dims."""
    if view.word("model.positions") != "rope":
        return
    for key in ("model.latent.rope_dim", "model.head_dim"):
        if view.has(key):
            width = view.integer(key)
            if width % 2:
                yield RuleViolation(
                    rule=ROPE_NEEDS_EVEN_HEAD,
                    message=f"{key} = {width} is odd, and rotary positions turn pairs of dims",
                    key=key,
                    set_by=(key,),
                    suggestions=[f"{key} = {width - 1}", f"{key} = {width + 1}"],
                )
            return


_ENDS = {
    "llama3": (
        "model.rope_scaling.low_frequency_factor",
        "model.rope_scaling.high_frequency_factor",
    ),
    "yarn": ("model.rope_scaling.slow_turns", "model.rope_scaling.fast_turns"),
}
"""Between which turns over the original positions a kind blends."""


def rope_scaling_order(view: View) -> Iterator[RuleViolation]:
    """Check that there is something between what is stretched and what is kept."""
    if not view.has_table("model.rope_scaling"):
        return
    ends = _ENDS.get(view.word("model.rope_scaling.kind"))
    if ends is None or any(view.value(key) == "none" for key in ends):
        return
    low_key, high_key = ends
    low, high = view.number(low_key), view.number(high_key)
    if low >= high:
        yield RuleViolation(
            rule=ROPE_SCALING_ORDER,
            message=f"{low_key} = {low:g} is not below {high_key.rpartition('.')[2]} = {high:g}",
            key=low_key,
            set_by=(low_key, high_key),
        )


def rope_scaling_factors(view: View) -> Iterator[RuleViolation]:
    """Check that longrope has a divisor for each frequency."""
    if not view.has_table("model.rope_scaling") or (
        view.word("model.rope_scaling.kind") != "longrope"
    ):
        return
    width = next(
        view.integer(key) for key in ("model.latent.rope_dim", "model.head_dim") if view.has(key)
    )
    # Of a head a part may turn, in whole pairs, as in Phi-4-mini.
    width = int(width * view.number("model.rotary.fraction")) // 2 * 2
    for name in ("short_factors", "long_factors"):
        key = f"model.rope_scaling.{name}"
        found = view.value(key)
        if isinstance(found, list | tuple) and len(cast("list[float]", found)) != width // 2:
            count = len(cast("list[float]", found))
            yield RuleViolation(
                rule=ROPE_SCALING_FACTORS,
                message=f"{key} has {count} numbers, and {width} dims turn in {width // 2} pairs",
                key=key,
                set_by=(key,),
            )


def experts_enough(view: View) -> Iterator[RuleViolation]:
    """Check that a token finds its top k experts, in some block."""
    if not view.has_table("model.experts"):
        return
    count, top_k = view.integer("model.experts.num_experts"), view.integer("model.experts.top_k")
    if top_k > count:
        yield RuleViolation(
            rule=EXPERTS_ENOUGH,
            message=f"model.experts.top_k = {top_k} is more than num_experts = {count}",
            key="model.experts.top_k",
            set_by=("model.experts.top_k", "model.experts.num_experts"),
            suggestions=(f"model.experts.top_k = {count}", f"model.experts.num_experts = {top_k}"),
        )
    dense, layers = view.integer("model.experts.first_dense_layers"), view.integer("model.layers")
    if dense >= layers:
        yield RuleViolation(
            rule=EXPERTS_ENOUGH,
            message=f"model.experts.first_dense_layers = {dense} leaves none of {layers} blocks "
            "to experts",
            key="model.experts.first_dense_layers",
            set_by=("model.experts.first_dense_layers", "model.layers"),
            suggestions=(f"model.experts.first_dense_layers = {layers - 1}",),
        )


def vocabulary_holds_tokenizer(view: View) -> Iterator[RuleViolation]:
    """Check that every id of the tokenizer is in the vocabulary, where its size is known.

    A prepared folder of tokens has a tokenizer of its own, which is checked when it is opened.
    """
    name = view.word("data.tokenizer")
    prepared = view.word("data.source") != "stdlib" or view.value("data.mixture") != "none"
    if prepared and view.is_default("data.tokenizer"):
        return
    trained = re.fullmatch(r"bpe-(\d{1,9})", name)
    if name != "bytes" and trained is None:
        return
    needed = int(trained[1]) if trained else BYTES_VOCABULARY
    vocab = view.integer("model.vocab")
    if vocab < needed:
        yield RuleViolation(
            rule=VOCABULARY_HOLDS_TOKENIZER,
            message=f"model.vocab = {vocab}, but the tokenizer {name} has {needed} ids",
            key="model.vocab",
            set_by=("model.vocab", "data.tokenizer"),
            suggestions=(f"model.vocab = {needed}",),
        )


def gate_is_built(view: View) -> Iterator[RuleViolation]:
    """Find a gate of experts that can be planned, but not yet run."""
    activation = view.word("model.activation")
    if view.has_table("model.experts") and view.flag("model.gated") and activation != "silu":
        yield RuleViolation(
            rule=NOT_BUILT_YET,
            key="model.activation",
            message=f"{view.model_name} has experts with {activation}: it can be planned, but not "
            "yet proven or trained",
            suggestions=('model.activation = "silu"',),
        )


def assume_has_effect(view: View) -> Iterator[RuleViolation]:
    """Find a yes to what is assumed of a model, where nothing is."""
    if view.flag("model.assume") and view.value("model.assumed") == "none":
        yield RuleViolation(
            rule=ASSUME_WITHOUT_EFFECT,
            message=f"model.assume = true, but nothing is assumed of {view.model_name}",
            key="model.assume",
            set_by=("model.assume",),
            suggestions=({"model.assume": False},),
        )


MODEL_FINDERS = (
    assume_has_effect,
    vocabulary_holds_tokenizer,
    heads_divide_hidden,
    kv_heads_divide_heads,
    rope_needs_even_head,
    rope_scaling_order,
    rope_scaling_factors,
    experts_enough,
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
