"""`echelon explain errata`: what published guides claim, and what holds, computed where it can be.

The claims are those of `planner/errata/claims/*.toml`; `echelon explain 002-07` is one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from echelon.cli.wrapped import wrapped
from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.core.rules import did_you_mean
from echelon.planner.errata.claims import GUIDES, VERDICTS, Claim, all_claims, select, topics
from echelon.planner.errata.computed import agrees, computed

HEAD = """\
Three guides to parallel training, read against our formulas: what each claims, and
what holds. 002 is a tutorial on data, tensor and pipeline parallelism and ZeRO, 003
one on ten kinds of parallelism, 004 a report on data parallelism; X is between them.
"""


LONG = 99_999
"""Whole numbers above it are shown with separators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrataQuestion:
    """Hold the word that was asked for, and the claims that it selects."""

    word: str | None
    claims: tuple[Claim, ...]


def ask_errata(word: str | None) -> ErrataQuestion:
    """Return the claims of an id, a verdict, a topic or a guide; ConfigError for another word."""
    claims = all_claims() if word is None else select(word)
    if not claims:
        known = (*VERDICTS, *topics(), *GUIDES, *(claim.id for claim in all_claims()))
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"no claim has the id, verdict, topic or guide {word!r}",
                set_by="the command line",
                works=did_you_mean(word or "", known) or (*VERDICTS, *topics(), *GUIDES),
            )
        )
    return ErrataQuestion(word=word, claims=claims)


def errata_json(question: ErrataQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    return {
        "counts": dict(Counter(claim.verdict for claim in question.claims)),
        "claims": [claim_json(claim) for claim in question.claims],
    }


def errata_text(question: ErrataQuestion) -> str:
    """Return the page that a person reads."""
    if len(question.claims) == 1:
        return claim_page(question.claims[0])
    counts = Counter(claim.verdict for claim in question.claims)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines = [*wrapped(" ".join(HEAD.split()), "", ""), "", f"{len(question.claims)}: {summary}", ""]
    for claim in question.claims:
        lines.extend(_rows(claim))
    words = ", ".join((*VERDICTS, *topics(), *GUIDES))
    more = (
        f"(=) is computed by our formulas. echelon explain errata takes one of: {words}, or an id."
    )
    return "\n".join([*lines, "", *wrapped(more, "", "")]) + "\n"


def claim_json(claim: Claim) -> dict[str, Any]:
    """Return a claim as JSON values, with what our formulas give."""
    ours = computed(claim)
    found = asdict(claim) | {"computed": ours}
    return found | ({} if ours is None else {"reproduced": agrees(ours, claim.holds)})


def claim_page(claim: Claim) -> str:
    """Return the page of one claim."""
    return "\n".join(_page(claim)) + "\n"


def shown(value: Any) -> str:
    """Return a value of a claim for people: at most five digits, parts by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_word(name)} {_part(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(
            f"({shown(one)})" if isinstance(one, list) else shown(one) for one in value
        )
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and value > LONG else str(value)


def _part(value: Any) -> str:
    return f"({shown(value)})" if isinstance(value, Mapping | list | tuple) else shown(value)


def _word(name: str) -> str:
    return name.replace("_", " ")


def _rows(claim: Claim) -> Iterator[str]:
    yield from wrapped(f"{claim.id:<7} {claim.verdict:<9}  {claim.claim}", "", " " * 19)
    ours = computed(claim)
    holds = shown(claim.holds) + (" (=)" if ours is not None else "")
    said = "" if claim.said is None or claim.verdict == "ok" else f"said {shown(claim.said)}; "
    yield from wrapped(f"{said}holds {holds}", " " * 19, " " * 19)


def _page(claim: Claim) -> Iterator[str]:
    yield f"{claim.id}: {claim.verdict}"
    yield ""
    yield from wrapped(f"{claim.claim} (guide {claim.guide}, {claim.where})", "", "")
    yield ""
    rows = {
        "said": "no value" if claim.said is None else shown(claim.said),
        "holds": shown(claim.holds),
        "inputs": shown(claim.inputs),
    }
    ours = computed(claim)
    if ours is not None:
        rows["computed"] = shown(_plain(ours))
    for name, text in rows.items():
        if text:
            yield from wrapped(f"{name:<8}  {text}", "  ", " " * 12)
    if claim.why:
        yield ""
        yield from wrapped(claim.why, "", "")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
