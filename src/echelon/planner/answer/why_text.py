# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan --why` prints below an answer, and a search in which nothing fits.

Reasons have a band for each number; of nothing that fits there is the leanest plan, and what would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from echelon.core.cluster import Device
from echelon.core.units import binary_bytes, decimal_bytes, gib
from echelon.planner.answer.recommend_text import plan_words
from echelon.planner.answer.search_json import ranked_json
from echelon.planner.explain.fixes import PlanFix
from echelon.planner.explain.neighbours import (
    CandidateDifference,
    Neighbour,
    NeighbourOutcome,
    candidate_differences,
)
from echelon.planner.explain.no_plan import LeanestPlan
from echelon.planner.explain.sensitivity import SensitivityResult
from echelon.planner.explain.why import BestPlanReasons, BindingConstraint, Explanation
from echelon.planner.predict.bands import BandedValue
from echelon.planner.report.estimate import byte_terms
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.view.text_layout import WIDTH, data_text, fill_text, fit_page, table

NAME_WIDTH = 22  # columns of text
MOST_TERMS = 3  # terms
SMALL = 0.0005
"""A share of a step that is not worth a line."""
SOURCE = (
    "In brackets: where four of five published runs like this lie, and at least from all hidden "
    "behind compute that can be to nothing; of memory, from an allocator that holds back nothing "
    "to one with twice its usual slack. Of a difference: where pairs of one sweep lie."
)


def explanation_text(explanation: Explanation, *, columns: int = WIDTH) -> str:
    """Return an explanation as the page that a person reads."""
    parts = [
        "\n".join(_why_lines(explanation.why, columns=columns)),
        _exposed(explanation.why, columns=columns),
    ]
    parts.append(
        "Why not another plan: each change at its best, all else free, and alone.\n\n"
        + "\n".join(_neighbours(explanation, columns=columns))
    )
    parts.append(
        "What would change the plan:\n\n"
        + "\n".join(_changes(explanation.changes, columns=columns))
    )
    parts.append(fill_text(SOURCE, columns=columns))
    if explanation.why.near:
        text = (
            "The space is large: searches again walked what is near the plan (degrees and "
            "microbatches up to twice and down to half; every schedule, ZeRO stage and recompute)."
        )
        parts.append(fill_text(text, columns=columns))
    return fit_page("\n\n".join(parts), columns=columns) + "\n"


def _why_lines(reasons: BestPlanReasons, *, columns: int) -> Iterator[str]:
    yield "Why this plan:"
    yield ""
    share = f"{100 * reasons.memory_share:.0f} % of {gib(reasons.memory_bytes)} GiB"
    low, high = reasons.held.low, reasons.held.high
    held = f"{gib(reasons.held.value)} GiB ({gib(low)} to {gib(high)}), {share}"
    yield from _entry("fullest", [f"{reasons.fullest}: {held}"], columns=columns)
    if not reasons.binding:
        yield from _entry(
            "binds", ["nothing: more memory or a larger batch gives under 0.2 %"], columns=columns
        )
    for one in reasons.binding:
        yield from _entry("binds", [_binding(one)], columns=columns)
    yield from _entry("step", [_seconds(reasons.step)], columns=columns)
    mfu = reasons.mfu
    yield from _entry(
        "MFU",
        [
            f"{100 * mfu.value:.1f} % with full attention ({100 * mfu.low:.1f} to "
            f"{100 * mfu.high:.1f}): "
            f"{reasons.ideal_s:.4g} s at the peak of all devices, {reasons.work_s:.4g} s of the "
            f"model's own computing, {reasons.step.value - reasons.work_s:.4g} s exposed beside it"
        ],
        columns=columns,
    )


def _binding(one: BindingConstraint) -> str:
    if one.kind == "divisibility":
        return f"divisibility: {', '.join(one.rules)} refuse the next degrees"
    assert one.gain is not None
    without = "without its limit" if one.kind == "memory" else "with twice the batch"
    text = f"{one.kind}: {without} {_percent(one.gain)} faster for each token"
    return text + (f" ({_differences(one.differences)})" if one.differences else "")


def _exposed(reasons: BestPlanReasons, *, columns: int) -> str:
    step = reasons.step.value
    rows = [
        (
            name,
            f"{one.value:.4g}",
            f"{one.low:.4g} to {one.high:.4g}",
            f"{100 * one.value / step:.1f} %",
        )
        for name, one in reasons.exposed.items()
        if max(one.value, one.high) > SMALL * step
    ]
    head = "Exposed in a step, beside the model's own compute:"
    return f"{head}\n\n{table(('term', 'seconds', 'band', 'of the step'), rows, columns=columns)}"


def _neighbours(explanation: Explanation, *, columns: int) -> Iterator[str]:
    """Yield what is said of each neighbour; a plan that is the best of several is told once."""
    seen: dict[CandidatePlan, str] = {}
    for one in explanation.neighbours:
        plan = one.at_best.plan
        before = None if plan is None else seen.get(plan.candidate)
        if plan is not None:
            seen.setdefault(plan.candidate, one.change)
        yield from _neighbour(one, explanation.why.best.candidate, before, columns=columns)


def _neighbour(
    one: Neighbour, best: CandidatePlan, before: str | None, *, columns: int
) -> Iterator[str]:
    free, exact = one.at_best, one.by_itself
    lines = [_outcome(free) if before is None else f"the plan of {before}: {_percent(free.share)}"]
    if exact is None:
        lines.append(f"alone: not possible, {one.obstacle}")
    elif exact == free or (
        exact.plan and free.plan and exact.plan.candidate == free.plan.candidate
    ):
        lines[0] += " (alone)"
    else:
        if free.plan is not None and before is None:
            lines.append(f"with {_differences(candidate_differences(best, free.plan.candidate))}")
        lines.append(f"alone: {_outcome(exact)}")
    yield from _entry(one.change, lines, columns=columns)


def _outcome(one: NeighbourOutcome) -> str:
    if one.verdict == "refused":
        first = one.problems[0]
        return f"refused by {first.rule}: {first.message}"
    if one.verdict == "too large":
        over = f" by {binary_bytes(one.over_bytes)}" if one.over_bytes > 0 else ""
        grown = ", ".join(f"{name} +{binary_bytes(more)}" for name, more in one.grown[:MOST_TERMS])
        return f"too large{over}" + (f" on {one.rank}: {grown}" if grown else "")
    assert one.slower_s is not None
    if one.verdict == "as fast":
        more = sum(count for _, count in one.grown)
        return "as fast" + (f", and holds {binary_bytes(more)} more" if more > 5e7 else "")
    terms = [(name, amount.value) for name, amount in one.terms.items() if amount.value]
    moved = ", ".join(f"{name} {seconds:+.3g} s" for name, seconds in terms[:MOST_TERMS])
    unsure = "" if one.slower_s.certain else ", within what is not known"
    return f"{_percent(one.share)}, {_seconds(one.slower_s, sign=True)}{unsure}: {moved}"


def _changes(changes: Sequence[SensitivityResult], *, columns: int) -> Iterator[str]:
    for one in changes:
        if one.best is None:
            yield from _entry(one.name, ["nothing fits"], wide=True, columns=columns)
            continue
        same = "" if one.gain_same is None else f" (this plan: {_percent(one.gain_same)})"
        if one.differences:
            text = f"{_differences(one.differences)}: {_percent(one.gain)}{same}"
        else:
            text = f"the same plan: {_percent(one.gain)}"
        yield from _entry(one.name, [text], wide=True, columns=columns)


def _differences(parts: Sequence[CandidateDifference]) -> str:
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in parts)


def _entry(name: str, texts: Sequence[str], *, wide: bool = False, columns: int) -> Iterator[str]:
    """Yield texts beside a name, or below it where that is long."""
    indent = NAME_WIDTH + 6 * wide
    margin = " " * (indent + 2)
    head = f"  {name}"
    for text in texts:
        wrapped = fill_text(text, first=margin, rest=margin, columns=columns)
        if head and len(head) < indent + 1:
            wrapped = head.ljust(indent + 2) + wrapped.lstrip()
        elif head:
            yield from fill_text(head, rest="    ", columns=columns).splitlines()
        head = ""
        yield from wrapped.splitlines()


def _seconds(amount: BandedValue, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    low, high = f"{amount.low:{plus}.4g}", f"{amount.high:{plus}.4g}"
    value = f"{amount.value:{plus}.4g} s"
    return value if low == high else f"{value} ({low} to {high})"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


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
