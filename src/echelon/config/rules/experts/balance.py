# SPDX-License-Identifier: Apache-2.0
"""What keeps experts busy: what must hold of capacity and balance, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from echelon.config.rules.suggestions import setting_changes
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.experts import (
    BALANCE_KEY,
    BIAS_KEY,
    CAPACITY_KEY,
    COUNT_KEY,
    DROPLESS,
    HAS_BIAS,
    STAGE_KEY,
    capacity_factor,
    has_experts,
    ranks_with_the_same_experts,
    require_experts,
)
from echelon.config.settings.schema import SETTINGS
from echelon.config.view import View
from echelon.core.experts import unrounded_capacity
from echelon.core.rulebook.experts import BIAS_BALANCE_HAS_BIAS, CAPACITY_HOLDS_TOKENS

LENGTH_KEY, TOP_K_KEY = "batch.sequence_length", "model.experts.top_k"
DROP_KEY, PADDED_KEY = "experts.drop", "experts.padded"
HAS_AUX = ("aux", "both")


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
        for key in SETTINGS:
            if key.startswith("experts.") and key not in view.wrong:
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
