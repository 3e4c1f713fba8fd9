# SPDX-License-Identifier: Apache-2.0
"""What `echelon explain ID` shows: rules, lints, and claims of guides; lists of the last two.

Claims are those of `handbook/errata/claims/*.toml`, with what holds, computed where it can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from inspect import cleandoc
from typing import Any

from echelon.cli.flags import bad_argument, plan_if_named
from echelon.core.plan import Plan
from echelon.core.rulebook import all_rules
from echelon.core.rules import Rule, did_you_mean
from echelon.core.serialize import to_json
from echelon.handbook.errata.claims import (
    GUIDES,
    SOURCES,
    VERDICTS,
    GuideSource,
    PublishedClaim,
    all_claims,
    select_claims,
    sources_named_in,
    topics,
)
from echelon.handbook.errata.other_claims import agrees_to_given_digits, computed_value
from echelon.planner.lint.checks import LINTS, lint, lint_rows
from echelon.planner.lint.finding import Lint
from echelon.planner.view.text_layout import WIDTH, fit_page, flow_paragraphs, wrap_text


def find_entry(name: str, *, columns: int = WIDTH) -> tuple[dict[str, Any], str] | None:
    """Return what has this id as JSON values and as its page; None where nothing has."""
    for rule in all_rules():
        if rule.id == name:
            return {"rule": to_json(rule)}, _rule_page(rule, columns=columns)
    for each in LINTS:
        if each.id == name:
            return {"lint": _lint_json(each)}, _lint_page(each, columns=columns)
    for claim in all_claims():
        if claim.id == name:
            return {"claim": _claim_json(claim)}, _claim_page(claim, columns=columns)
    return None


def _rule_page(rule: Rule, *, columns: int) -> str:
    """Return the page of a rule, its sentences as long as there is room for."""
    why = cleandoc(rule.why)
    page = rule.page().replace(why, flow_paragraphs(why, columns=columns))
    return fit_page(page, columns=columns)


def known_ids() -> list[str]:
    """Return every id."""
    return [one.id for one in (*all_rules(), *LINTS, *all_claims())]


def ask_lints(run: str | None = None, settings: Sequence[str] = ()) -> Plan | None:
    """Return the plan to look at, None for the list; ConfigError where settings have no run."""
    return plan_if_named(run, settings, "lints nano")


def lints_json(plan: Plan | None) -> dict[str, Any]:
    """Return the page as JSON values."""
    found = {"lints": [_lint_json(each) for each in LINTS]}
    if plan is None:
        return found
    return found | {"findings": [asdict(finding) for finding in lint(plan)]}


def lints_text(plan: Plan | None, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    if plan is None:
        each = (
            wrap_text(f"{one.id} ({one.severity}): {one.why}", "", "    ", columns=columns)
            for one in LINTS
        )
        lines = [line for rows in each for line in rows]
    else:
        lines = lint_rows(plan, columns) or [f"{len(LINTS)} lints found nothing."]
    return "\n".join(lines) + "\n"


def _lint_json(each: Lint) -> dict[str, str]:
    """Return a lint as JSON values."""
    return {"id": each.id, "severity": each.severity, "why": each.why, "source": each.source}


def _lint_page(each: Lint, *, columns: int) -> str:
    """Return the page of one lint."""
    parts = (each.why, f"At stake: {each.severity}. Source: {each.source}.")
    paragraphs = [wrap_text(part, "", "", columns=columns) for part in parts]
    if named := sources_named_in(each.source):
        paragraphs.append([*guide_rows(named, columns=columns)])
    text = "\n\n".join("\n".join(lines) for lines in paragraphs)
    return f"{each.id}\n\n{text}\n\nA lint refuses nothing: echelon explain lints RUN\n"


HEAD = """\
Three guides to parallel training, read against our formulas: what each claims, and
what holds. An id names its guide; "between" is where guides differ from one another.
"""

LONG = 99_999
"""Whole numbers above it are shown with separators."""


def ask_errata(run: str | None = None) -> tuple[PublishedClaim, ...]:
    """Return the claims of an id, a verdict, a topic or a guide; ConfigError for another word.

    The word stands where other pages have their run.
    """
    claims = all_claims() if run is None else select_claims(run)
    if not claims:
        known = (*VERDICTS, *topics(), *GUIDES, *(claim.id for claim in all_claims()))
        near = did_you_mean(run or "", known) or (*VERDICTS, *topics(), *GUIDES)
        raise bad_argument(f"no claim has the id, verdict, topic or guide {run!r}", *near)
    return claims


def errata_json(claims: Sequence[PublishedClaim]) -> dict[str, Any]:
    """Return the page as JSON values."""
    return {
        "counts": dict(Counter(claim.verdict for claim in claims)),
        "claims": [_claim_json(claim) for claim in claims],
    }


def errata_text(claims: Sequence[PublishedClaim], *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    if len(claims) == 1:
        return _claim_page(claims[0], columns=columns)
    counts = Counter(claim.verdict for claim in claims)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines = [
        *wrap_text(" ".join(HEAD.split()), "", "", columns=columns),
        "",
        *guide_rows(SOURCES.values(), columns=columns),
        "",
        f"{len(claims)}: {summary}",
        "",
    ]
    for claim in claims:
        lines.extend(_rows(claim, columns=columns))
    words = ", ".join((*VERDICTS, *topics(), *GUIDES))
    more = (
        f"(=) is computed by our formulas. echelon explain errata takes one of: {words}, or an id."
    )
    return "\n".join([*lines, "", *wrap_text(more, "", "", columns=columns)]) + "\n"


def _claim_json(claim: PublishedClaim) -> dict[str, Any]:
    """Return a claim as JSON values, with what our formulas give."""
    ours = computed_value(claim)
    found = asdict(claim) | {"computed": ours}
    if ours is not None:
        found["reproduced"] = agrees_to_given_digits(ours, claim.holds)
    return found


def _claim_page(claim: PublishedClaim, *, columns: int) -> str:
    """Return the page of one claim."""
    return "\n".join(_page(claim, columns=columns)) + "\n"


def shown(value: Any) -> str:
    """Return a value of a claim for people: at most five digits, parts by name."""
    if isinstance(value, Mapping):
        parts = (
            f"({shown(part)})" if isinstance(part, Mapping | list | tuple) else shown(part)
            for part in value.values()
        )
        names = (name.replace("_", " ") for name in value)
        return ", ".join(f"{name} {part}" for name, part in zip(names, parts, strict=True))
    if isinstance(value, list | tuple):
        return ", ".join(
            f"({shown(one)})" if isinstance(one, list) else shown(one) for one in value
        )
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        value = int(value)
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and value > LONG else str(value)


def _rows(claim: PublishedClaim, *, columns: int) -> Iterator[str]:
    yield from wrap_text(
        f"{claim.id:<16} {claim.verdict:<9}  {claim.claim}", "", " " * 28, columns=columns
    )
    ours = computed_value(claim)
    holds = shown(claim.holds) + (" (=)" if ours is not None else "")
    said = "" if claim.said is None or claim.verdict == "ok" else f"said {shown(claim.said)}; "
    yield from wrap_text(f"{said}holds {holds}", " " * 28, " " * 28, columns=columns)


def _page(claim: PublishedClaim, *, columns: int) -> Iterator[str]:
    yield f"{claim.id}: {claim.verdict}"
    yield ""
    yield from wrap_text(f"{claim.claim} ({claim.guide}, {claim.where})", "", "", columns=columns)
    yield ""
    rows = {
        "said": "no value" if claim.said is None else shown(claim.said),
        "holds": shown(claim.holds),
        "inputs": shown(claim.inputs),
    }
    ours = computed_value(claim)
    if ours is not None:
        rows["computed"] = shown([*ours] if isinstance(ours, tuple) else ours)
    for name, text in rows.items():
        if text:
            yield from wrap_text(f"{name:<8}  {text}", "  ", " " * 12, columns=columns)
    if claim.why:
        yield ""
        yield from wrap_text(claim.why, "", "", columns=columns)
    if named := sources_named_in(f"{claim.id} {claim.why}"):
        yield ""
        yield from guide_rows(named, columns=columns)


def guide_rows(guides: Iterable[GuideSource], *, columns: int = WIDTH) -> Iterator[str]:
    """Yield guides for people: key, author, title, year, and where each is to be found."""
    for guide in guides:
        yield from wrap_text(str(guide), "  ", "      ", columns=columns)
