# SPDX-License-Identifier: Apache-2.0
"""A search in which nothing fits, as a page and as JSON: the leanest plan, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from echelon.core.cluster import Device
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.planner.answer.recommend_text import plan_words
from echelon.planner.answer.search_json import ranked_json
from echelon.planner.explain.fixes import PlanFix
from echelon.planner.explain.no_plan import LeanestPlan
from echelon.planner.report.estimate import byte_terms
from echelon.planner.view.text_layout import WIDTH, data_text, fill_text, fit_page, table

MOST_FIXES = 12  # fixes
_LABEL = 10  # columns
_HEADER = ("change", "holds", "time", "devices", "type")


def no_plan_text(leanest: LeanestPlan, *, columns: int = WIDTH) -> str:
    """Return the page of a search in which nothing fits; no line is wider than `columns`."""
    lines = [
        fill_text(f"{label:<{_LABEL}}{text}", rest=" " * _LABEL, columns=columns)
        for label, text in _facts(leanest)
    ]
    held = data_text(byte_terms(leanest.estimate, leanest.request.memory_bytes), columns=columns)
    device = leanest.request.cluster.device
    parts = [
        "\n".join(lines),
        held,
        fixes_text(leanest.fixes, device, columns=columns).rstrip("\n"),
    ]
    return fit_page("\n\n".join(parts), columns=columns) + "\n"


def _facts(leanest: LeanestPlan) -> Iterator[tuple[str, str]]:
    """Yield the leanest plan, what it holds, and which of its terms are too large."""
    choice, estimate = leanest.ranked.candidate, leanest.estimate
    over = binary_bytes(leanest.over_bytes)
    yield "fits", f"no: none of {leanest.num_legal:,} legal plans"
    yield "leanest", f"{plan_words(choice)}, {estimate.step_s:.4g} s a step"
    yield (
        "memory",
        f"{binary_bytes(estimate.bytes_held)}, and a device has "
        f"{binary_bytes(leanest.request.memory_bytes)}: {over} too little",
    )
    name, largest = leanest.terms[0]
    enough = largest >= leanest.over_bytes
    yield (
        "too large",
        f"{name}, {binary_bytes(largest)}: "
        + (f"{over} less of it would be enough" if enough else f"less than the {over} missing"),
    )


def fixes_text(fixes: Sequence[PlanFix], device: Device, *, columns: int = WIDTH) -> str:
    """Return the changes with which a plan fits as a table; seconds are of closed forms."""
    if not fixes:
        return "No change that was tried makes it fit.\n"
    rows = [
        (
            ", ".join(fix.changes),
            binary_bytes(fix.estimate.bytes_held),
            f"x{fix.time_ratio:.3g}",
            f"{fix.devices:,}",
            fix.flags,
        )
        for fix in fixes[:MOST_FIXES]
    ]
    legend = "holds: on the fullest rank. time: of a token, beside that of the plan above."
    if any(fix.choice.offload for fix in fixes):
        rate = decimal_bytes(device.host_bandwidth)
        legend += f" Optimizer state on the host goes over a link of {rate}/s."
    head = "What fits, the cheapest change of each kind first:"
    return f"{head}\n\n{table(_HEADER, rows, columns)}\n\n{fill_text(legend, columns=columns)}\n"


def leanest_json(leanest: LeanestPlan) -> dict[str, Any]:
    """Return the leanest plan and what would fit as JSON values."""
    request = leanest.request
    return {
        "plan": ranked_json(request, leanest.ranked),
        "memory_bytes": int(request.memory_bytes),
        "over_bytes": leanest.over_bytes,
        "largest_term": leanest.terms[0][0],
        "legal_plans": leanest.num_legal,
        "fixes": [fix_json(fix) for fix in leanest.fixes],
    }


def fix_json(fix: PlanFix) -> dict[str, Any]:
    """Return changes with which a plan fits as JSON values."""
    return {
        "changes": list(fix.changes),
        "type": fix.flags,
        "settings": dict(fix.settings),
        "devices": fix.devices,
        "held_bytes": fix.estimate.bytes_held,
        "saved_bytes": fix.saved_bytes,
        "step_s": fix.estimate.step_s,
        "slower_s": asdict(fix.lost_s),
        "time_ratio_of_a_token": fix.time_ratio,
        "optimizer_offload": "host" if fix.choice.offload else "none",
    }
