# SPDX-License-Identifier: Apache-2.0
"""The longest sequence of which a plan fits, as facts of a page and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.core.units import binary_bytes
from echelon.planner.predict.bands import fit_probability
from echelon.planner.recommend.longest_sequence import LongestSequence


def longest_facts(found: LongestSequence) -> Iterator[tuple[str, str]]:
    """Yield the longest sequence and its positions, each as a label and a text."""
    request = found.request
    text = f"{found.tokens:,} tokens in a sequence"
    if found.too_long is None:
        text += f", all positions that {request.model.name} has"
    elif found.leanest is None:
        text += f"; of {found.too_long:,} no plan is legal"
    else:
        held, memory = found.leanest.estimate.bytes_held, request.memory_bytes
        chance = 100 * fit_probability(found.leanest.estimate, memory)
        text += (
            f"; of {found.too_long:,} the leanest plan holds {binary_bytes(held)}, a device has "
            f"{binary_bytes(memory)}"
        ) + (f": it fits with {chance:.0f} % only" if held <= memory else "")
    yield "longest", text
    if found.tokens > found.positions:
        yield (
            "positions",
            f"model.max_positions = {found.tokens:,} in the place of {found.positions:,}: no "
            f"weight changes, but weights that were trained on {found.positions:,} know only those",
        )
    elif found.too_long is None:
        yield "positions", "learned: more of them are new rows of a table, untrained"


def longest_json(found: LongestSequence) -> dict[str, Any]:
    """Return the longest sequence as JSON values."""
    leanest = found.leanest
    return {
        "tokens": found.tokens,
        "max_positions": found.request.model.max_positions,
        "max_positions_before": found.positions,
        "too_long": found.too_long,
        "least_bytes_of_too_long": None if leanest is None else leanest.estimate.bytes_held,
    }
