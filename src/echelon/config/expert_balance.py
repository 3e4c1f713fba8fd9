"""What keeps experts busy: what must hold of capacity and balance, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from echelon.config.expert_settings import EXPERTS
from echelon.config.experts import (
    BALANCE_KEY,
    BIAS_KEY,
    CAPACITY_KEY,
    COUNT_KEY,
    DROPLESS,
    STAGE_KEY,
    capacity_factor,
    has_experts,
    ranks_with_the_same_experts,
    require_experts,
)
from echelon.config.faults import Fault, each, idle
from echelon.config.view import View
from echelon.core.experts import room
from echelon.core.rulebook.experts import BIAS_BALANCE_HAS_BIAS, CAPACITY_HOLDS_TOKENS

LENGTH_KEY, TOP_K_KEY = "batch.sequence_length", "model.experts.top_k"
DROP_KEY, PADDED_KEY = "experts.drop", "experts.padded"
HAS_AUX, HAS_BIAS = ("aux", "both"), ("bias", "both")


def capacity_holds_tokens(view: View) -> Iterator[Fault]:
    """Find a capacity of less than a token, which drops nearly everything."""
    require_experts(view)
    factor = capacity_factor(view)
    if factor is None:
        return
    length, top_k, count = (view.integer(k) for k in (LENGTH_KEY, TOP_K_KEY, COUNT_KEY))
    held = room(factor, length, count, top_k)
    if held < 1:
        least = ceil(100 * count / (length * top_k)) / 100
        yield Fault(
            rule=CAPACITY_HOLDS_TOKENS,
            key=CAPACITY_KEY,
            message=f"{CAPACITY_KEY} = {factor:g} gives an expert room for {factor:g} x "
            f"sequence_length x top_k / num_experts = {factor:g} x {length} x {top_k} / {count} = "
            f"{held:g} tokens of a sequence, which is less than one",
            others=(LENGTH_KEY, TOP_K_KEY, COUNT_KEY),
            ways=(each(CAPACITY_KEY, dict.fromkeys((least, max(least, 1.0)))), _dropless()),
        )


def _dropless() -> Iterator[dict[str, object]]:
    yield {CAPACITY_KEY: DROPLESS}


def bias_balance_has_bias(view: View) -> Iterator[Fault]:
    """Find a balance by a bias that the router is said not to have.

    Where nobody says so, it follows from the balance.
    """
    require_experts(view)
    said = BIAS_KEY in view.entries and not view.flag(BIAS_KEY)
    if view.word(BALANCE_KEY) in HAS_BIAS and said:
        yield Fault(
            rule=BIAS_BALANCE_HAS_BIAS,
            key=BIAS_KEY,
            message=f'{BALANCE_KEY} = "{view.word(BALANCE_KEY)}" moves a bias of the router, but '
            f"{BIAS_KEY} = false leaves it out",
            others=(BALANCE_KEY,),
            ways=(each(BIAS_KEY, [True]), each(BALANCE_KEY, ["aux"])),
        )


def settings_without_experts(view: View) -> Iterator[Fault]:
    """Find settings of experts of a model that has none."""
    if not has_experts(view):
        for one in EXPERTS:
            if one.key not in view.wrong:
                yield from idle(view, one.key, f"{view.model_name} has no experts")


def settings_without_effect(view: View) -> Iterator[Fault]:
    """Find settings of a balance, or of drops, that there is not."""
    require_experts(view)
    balance = view.word(BALANCE_KEY)
    told = f'{BALANCE_KEY} = "{balance}"'
    if balance not in HAS_AUX:
        for name in ("aux_coefficient", "aux_over"):
            yield from idle(view, f"experts.{name}", f"{told} adds no loss", _also(view, "aux"))
    if balance not in HAS_BIAS:
        yield from idle(view, "experts.bias_rate", f"{told} moves no bias", _also(view, "bias"))
    if capacity_factor(view) is None:
        why = f'nothing is dropped, {CAPACITY_KEY} = "{DROPLESS}"'
        yield from idle(view, DROP_KEY, why, {CAPACITY_KEY: 1.25})


def capacity_drops(view: View) -> Iterator[Fault]:
    """Find a capacity for all tokens of a sequence; padded it still says to what size."""
    require_experts(view)
    factor = capacity_factor(view)
    if factor is None or view.flag(PADDED_KEY):
        return
    length, top_k, count = (view.integer(k) for k in (LENGTH_KEY, TOP_K_KEY, COUNT_KEY))
    held = ceil(room(factor, length, count, top_k))
    if held >= length:
        why = f"an expert has room for {held} tokens of a sequence, and there are {length}"
        both = {CAPACITY_KEY: DROPLESS, DROP_KEY: "position"}
        ways = [] if view.is_default(DROP_KEY) else [both]
        yield from idle(view, CAPACITY_KEY, why, *ways)


def _also(view: View, kind: str) -> dict[str, object]:
    return {BALANCE_KEY: kind if view.word(BALANCE_KEY) == "none" else "both"}


def stage_shares_out(view: View) -> Iterator[Fault]:
    """Find a ZeRO stage of experts where no two ranks of a replica hold the same ones."""
    require_experts(view)
    if ranks_with_the_same_experts(view) == 1:
        why = "no two ranks of a replica hold the same experts, and nothing is shared out"
        # A resolved file has what "auto" was.
        yield from idle(view, STAGE_KEY, why, fine=(0, view.integer("zero.stage")))


BALANCE_FAULTS = (
    capacity_holds_tokens,
    bias_balance_has_bias,
)
IDLE_FAULTS = (
    settings_without_experts,
    settings_without_effect,
    capacity_drops,
    stage_shares_out,
)
