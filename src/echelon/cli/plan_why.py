"""What `echelon plan --why` prints below an answer: reasons, with a band for each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from echelon.cli.output import table
from echelon.planner.explain.differences import differences

if TYPE_CHECKING:
    from echelon.planner.choice import Choice
    from echelon.planner.explain.bands import Banded
    from echelon.planner.explain.differences import Difference
    from echelon.planner.explain.explanation import Explanation
    from echelon.planner.explain.fixes import Fix
    from echelon.planner.explain.neighbours import Neighbour, Outcome
    from echelon.planner.explain.sensitivity import Change
    from echelon.planner.explain.why import Binding, Why
    from echelon.planner.search import Answer

WIDTH = 80
NAME_WIDTH = 22
MOST_TERMS = 3
MOST_FIXES = 12
SMALL = 0.0005
"""A share of a step that is not worth a line."""
SOURCE = (
    "In brackets: where four of five published runs like this lie, and at least from all hidden "
    "behind compute that can be to nothing; of memory, from an allocator that holds back nothing "
    "to one with twice its usual slack. Of a difference: where pairs of one sweep lie."
)


def why_text(answer: Answer) -> str:
    """Return why the best plan of an answer is the best; every line has 80 columns at most."""
    from echelon.planner.explain.explanation import explanation_of

    return explanation_text(explanation_of(answer))


def explanation_text(told: Explanation) -> str:
    """Return an explanation as the page that a person reads."""
    parts = ["\n".join(_why_lines(told.why)), _exposed(told.why)]
    parts.append(
        "Why not another plan: each change at its best, all else free, and alone.\n\n"
        + "\n".join(_neighbours(told))
    )
    parts.append("What would change the plan:\n\n" + "\n".join(_changes(told.changes)))
    parts.append(fill(SOURCE, WIDTH))
    if told.why.near:
        text = (
            "The space is large: searches again walked what is near the plan (degrees and "
            "microbatches up to twice and down to half; every schedule, ZeRO stage and recompute)."
        )
        parts.append(fill(text, WIDTH))
    return "\n\n".join(parts) + "\n"


def fixes_text(fixes: Sequence[Fix]) -> str:
    """Return what makes a plan fit, the cheapest first, as a table and the settings of the first.

    Seconds lost are those of closed forms.
    """
    if not fixes:
        return "No change of up to three choices makes it fit.\n"
    first, *others = fixes[:MOST_FIXES]
    lines = ["What makes it fit, the cheapest first:", ""]
    for fix in (first, *others):
        lost = "not timed: over the host's link" if fix.untimed else _seconds(fix.lost_s, sign=True)
        devices = f"{fix.devices:,} device{'s' * (fix.devices > 1)}"
        text = f"{_gb(fix.saved_bytes)} GB less, {lost}, {devices}"
        lines.extend(_entry(" + ".join(fix.changes), [text]))
    settings = " ".join(f"--set {key}={_value(value)}" for key, value in first.settings.items())
    lines += ["", fill(f"the first: {settings}", WIDTH, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _why_lines(told: Why) -> Iterator[str]:
    yield "Why this plan:"
    yield ""
    share = f"{100 * told.memory_share:.0f} % of {_gb(told.memory_bytes)} GB"
    held = f"{_gb(told.held.value)} GB ({_gb(told.held.low)} to {_gb(told.held.high)}), {share}"
    yield from _entry("fullest", [f"{told.fullest}: {held}"])
    if not told.binding:
        yield from _entry("binds", ["nothing: more memory or a larger batch gives under 0.2 %"])
    for one in told.binding:
        yield from _entry("binds", [_binding(one)])
    yield from _entry("step", [_seconds(told.step)])
    mfu = told.mfu
    yield from _entry(
        "MFU",
        [
            f"{100 * mfu.value:.1f} % ({100 * mfu.low:.1f} to {100 * mfu.high:.1f}): "
            f"{told.ideal_s:.4g} s at the peak of all devices, {told.work_s:.4g} s of the model's "
            f"own computing, {told.step.value - told.work_s:.4g} s exposed beside it"
        ],
    )


def _binding(one: Binding) -> str:
    if one.kind == "divisibility":
        return f"divisibility: {', '.join(one.rules)} refuse the next degrees"
    assert one.gain is not None
    without = "without its limit" if one.kind == "memory" else "with twice the batch"
    text = f"{one.kind}: {without} {_percent(one.gain)} faster for each token"
    return text + (f" ({_differences(one.differences)})" if one.differences else "")


def _exposed(told: Why) -> str:
    step = told.step.value
    rows = [
        (
            term.name,
            f"{term.amount.value:.4g}",
            f"{term.amount.low:.4g} to {term.amount.high:.4g}",
            f"{100 * term.amount.value / step:.1f} %",
        )
        for term in told.exposed
        if max(term.amount.value, term.amount.high) > SMALL * step
    ]
    head = "A step waits for, beside the model's own computing:"
    return f"{head}\n\n{table(('term', 'seconds', 'band', 'of the step'), rows)}"


def _neighbours(told: Explanation) -> Iterator[str]:
    """Yield what is said of each neighbour; a plan that is the best of several is told once."""
    seen: dict[Choice, str] = {}
    for one in told.neighbours:
        plan = one.free.plan
        before = None if plan is None else seen.get(plan.choice)
        if plan is not None:
            seen.setdefault(plan.choice, one.move)
        yield from _neighbour(one, told.why.best.choice, before)


def _neighbour(one: Neighbour, best: Choice, before: str | None) -> Iterator[str]:
    free, exact = one.free, one.exact
    lines = [_outcome(free) if before is None else f"the plan of {before}: {_percent(free.share)}"]
    if exact is None:
        lines.append(f"alone: not possible, {one.obstacle}")
    elif exact == free or _same_plan(exact, free):
        lines[0] += " (alone)"
    else:
        if free.plan is not None and before is None:
            lines.append(f"with {_differences(differences(best, free.plan.choice))}")
        lines.append(f"alone: {_outcome(exact)}")
    yield from _entry(one.move, lines)


def _same_plan(one: Outcome, other: Outcome) -> bool:
    return one.plan is not None and other.plan is not None and one.plan.choice == other.plan.choice


def _outcome(one: Outcome) -> str:
    if one.verdict == "refused":
        first = one.problems[0]
        return f"refused by {first.rule}: {first.message}"
    if one.verdict == "too large":
        over = f" by {_gb(one.over_bytes)} GB" if one.over_bytes > 0 else ""
        grown = ", ".join(f"{name} +{_gb(more)} GB" for name, more in one.grown[:MOST_TERMS])
        return f"too large{over}" + (f" on {one.rank}: {grown}" if grown else "")
    assert one.slower_s is not None
    if one.verdict == "as fast":
        more = sum(count for _, count in one.grown)
        return "as fast" + (f", and holds {_gb(more)} GB more" if more > 5e7 else "")
    terms = [term for term in one.terms if abs(term.amount.value) > 0][:MOST_TERMS]
    moved = ", ".join(f"{term.name} {term.amount.value:+.3g} s" for term in terms)
    unsure = "" if one.slower_s.certain else ", within what is not known"
    return f"{_percent(one.share)}, {_seconds(one.slower_s, sign=True)}{unsure}: {moved}"


def _changes(changes: Sequence[Change]) -> Iterator[str]:
    for one in changes:
        if one.best is None:
            yield from _entry(one.name, ["nothing fits"], wide=True)
            continue
        same = "" if one.gain_same is None else f" (this plan: {_percent(one.gain_same)})"
        if one.differences:
            text = f"{_differences(one.differences)}: {_percent(one.gain)}{same}"
        else:
            text = f"the same plan: {_percent(one.gain)}"
        yield from _entry(one.name, [text], wide=True)


def _differences(parts: Sequence[Difference]) -> str:
    return ", ".join(f"{one.name} {one.old} -> {one.new}" for one in parts)


def _entry(name: str, texts: Sequence[str], *, wide: bool = False) -> Iterator[str]:
    """Yield texts beside a name, or below it where that is long."""
    indent = NAME_WIDTH + 6 * wide
    margin = " " * (indent + 2)
    head = f"  {name}"
    for text in texts:
        wrapped = fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin)
        if head and len(head) < indent + 1:
            wrapped = head.ljust(indent + 2) + wrapped.lstrip()
        elif head:
            yield from fill(head, WIDTH, subsequent_indent="    ").splitlines()
        head = ""
        yield from wrapped.splitlines()


def _seconds(amount: Banded, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    low, high = f"{amount.low:{plus}.4g}", f"{amount.high:{plus}.4g}"
    value = f"{amount.value:{plus}.4g} s"
    return value if low == high else f"{value} ({low} to {high})"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
