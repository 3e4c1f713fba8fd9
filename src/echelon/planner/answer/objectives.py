# SPDX-License-Identifier: Apache-2.0
"""What a search for a long run or for the longest sequence says: facts, arithmetic and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.core.units import binary_bytes
from echelon.cost.seconds.interruptions import (
    INTERRUPTED_DAYS,
    INTERRUPTED_DEVICES,
    INTERRUPTIONS,
    RETRIED_SLOWER,
    STORED_BYTES_PER_S,
    TOKENS_PER_PARAMETER,
)
from echelon.planner.predict.bands import fit_probability
from echelon.planner.predict.expected import ExpectedStep
from echelon.planner.recommend.longest_sequence import LongestSequence
from echelon.planner.view.text_layout import WIDTH, fill_text

_LABEL = 13  # columns
_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (0.0, "s"))


def duration(seconds: float) -> str:
    """Return seconds in the largest unit of which there is one."""
    size, unit = next(one for one in _UNITS if seconds >= one[0])
    return f"{seconds / (size or 1.0):.3g} {unit}"


def expected_line(one: ExpectedStep) -> str:
    """Return what a step is expected to take, and why that is more than a step alone."""
    lost = 1.0 - 1.0 / one.slowdown
    return (
        f"{one.total_s:.4g} s a step with interruptions (one every "
        f"{duration(one.interruptions.between_s)}, {100 * lost:.1f} % of the time lost) and the "
        f"risk that it does not fit"
    )


def expected_lines(one: ExpectedStep, columns: int = WIDTH) -> Iterator[str]:
    """Yield the arithmetic of an expected step, in lines of so many columns at most."""
    yield "A step of a long run is expected to take longer than one alone:"
    yield ""
    for label, text in _parts(one):
        margin = " " * (_LABEL + 2)
        yield fill_text(text, columns=columns, first=f"  {label:<{_LABEL}}", rest=margin)


def _parts(one: ExpectedStep) -> Iterator[tuple[str, str]]:
    found = one.interruptions
    between, write = duration(found.between_s), duration(found.write_s)
    yield (
        "interrupted",
        f"{INTERRUPTIONS} times in {INTERRUPTED_DAYS} days on {INTERRUPTED_DEVICES:,} devices "
        f"(Llama 3, 2024, table 5): on {one.devices:,} every {between}",
    )
    yield (
        "checkpoint",
        f"{binary_bytes(one.checkpoint_bytes)}, {STORED_BYTES_PER_S / 1e6:.0f} MB/s of a device "
        f"(Llama 3, section 3.3.1): {write}",
    )
    yield (
        "written",
        f"every sqrt(2 x {write} x {between}) = {duration(found.interval_s)} (Young, 1974; Daly, "
        "2006)",
    )
    yield (
        "lost",
        f"each time about half of that and a restart of {duration(found.restart_s)} = "
        f"{duration(found.lost_s)}",
    )
    yield (
        "slower",
        f"exp({found.restart_s:.4g} / {found.between_s:.4g}) x {found.between_s:.4g} / "
        f"{found.interval_s:.4g} x (exp(({found.interval_s:.4g} + {found.write_s:.4g}) / "
        f"{found.between_s:.4g}) - 1) = {one.slowdown:.4f} (Daly, 2006)",
    )
    yield (
        "risk",
        f"{100 * (1 - one.fits):.1f} % that it does not fit: then a restart, and "
        f"{RETRIED_SLOWER:.3g} times the step = {one.risk:.4f}",
    )
    yield (
        "run",
        f"{one.steps:,.0f} steps: {TOKENS_PER_PARAMETER:.0f} tokens for each parameter (Hoffmann "
        f"et al., 2022); the restart is {one.retry_s:.2g} s of each",
    )
    yield (
        "expected",
        f"{one.step_s:.4g} s x {one.slowdown:.4f} x {one.risk:.4f} + {one.retry_s:.2g} s = "
        f"{one.total_s:.4g} s, {one.tokens_per_day / 1e9:.4g} billion tokens a day",
    )


def expected_json(one: ExpectedStep) -> dict[str, Any]:
    """Return an expected step as JSON values."""
    found = one.interruptions
    return {
        "step_s": one.total_s,
        "slowdown": one.slowdown,
        "risk": one.risk,
        "retry_s": one.retry_s,
        "run_steps": one.steps,
        "tokens_per_day": one.tokens_per_day,
        "checkpoint_bytes": one.checkpoint_bytes,
        "checkpoint_s": found.write_s,
        "checkpoint_interval_s": found.interval_s,
        "interrupted_every_s": found.between_s,
        "lost_s": found.lost_s,
    }


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
