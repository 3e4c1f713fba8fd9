# SPDX-License-Identifier: Apache-2.0
"""The plans of an answer as rows of numbers and words: what a table of them is made of.

The columns are the same for every answer, in the same order, and have the names of the JSON where
it has one; what has a unit ends with it. No cell is empty: what there is none of is "none" or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

from echelon.planner.answer.estimated import EstimatedPlan
from echelon.planner.answer.search_json import choices_json
from echelon.planner.predict.bands import BandedValue

RowValue = int | float | str | bool


def plan_row(one: EstimatedPlan) -> dict[str, RowValue]:
    """Return a plan of an answer as a row: its choices, its numbers, then every term.

    A number with a band is three columns, as `step_s`, `step_s_low` and `step_s_high`; a term of
    the step is `TERM_s`, one of what the fullest rank holds `TERM_bytes`.
    """
    choices: dict[str, Any] = choices_json(one.ranked)
    mesh: Mapping[str, int] = choices.pop("mesh")
    del choices["devices"]
    return {
        "preferred_for": ", ".join(one.preferred_for),
        "plan": str(one),
        "devices": one.devices,
        "idle_devices": one.idle_devices,
        **mesh,
        **choices,
        "context": choices["context"] or "none",
        "recompute_every": one.ranked.candidate.recompute,
        "recompute_operators": " ".join(one.ranked.candidate.operators),
        **_banded("step_s", one.step_s),
        **_banded("tokens_per_s_per_device", one.tokens_per_s_per_device),
        **_banded("mfu", one.mfu),
        **_banded("price_of_a_million_tokens", one.price_of_a_million_tokens),
        **_banded("held_bytes", one.held_bytes),
        "allocated_bytes": one.ranked.estimate.allocated_bytes,
        "reserved_bytes": one.ranked.estimate.reserved_bytes,
        "device_memory_bytes": one.memory_bytes,
        "fit_probability": one.fits,
        **{f"{name}_s": seconds for name, seconds in one.ranked.estimate.seconds.items()},
        **{f"{name}_bytes": held for name, held in one.ranked.estimate.bytes.items()},
    }


def _banded(name: str, amount: BandedValue | None) -> dict[str, RowValue]:
    if amount is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), nan)
    return {name: amount.value, f"{name}_low": amount.low, f"{name}_high": amount.high}
