# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan --objective expected` says of a long run: a line, and all its arithmetic."""

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
from echelon.planner.predict.expected import ExpectedStep
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
