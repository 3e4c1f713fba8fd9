"""Where a published guide was wrong: the errata, as a lesson shows them."""

from __future__ import annotations

from echelon.handbook.errata.claims import PublishedClaim, all_claims
from echelon.page.lessons.lesson import Correction


def corrections(*ids: str) -> tuple[Correction, ...]:
    """Return the corrections of claims by their ids; KeyError for an id that is no claim's."""
    known = {claim.id: claim for claim in all_claims()}
    return tuple(_correction(known[claim]) for claim in ids)


def _correction(claim: PublishedClaim) -> Correction:
    holds = "that is right" if claim.verdict == "ok" else _text(claim.holds)
    return Correction(id=claim.id, said=_said(claim), holds=f"{holds}. {claim.why}".rstrip())


def _said(claim: PublishedClaim) -> str:
    """Return what the guide says; a value that its sentence has is not told again."""
    value = "" if claim.said is None else _text(claim.said)
    return f"{claim.claim}: {value}" if value.lower() not in claim.claim.lower() else claim.claim


def _text(value: object) -> str:
    if isinstance(value, dict):
        named = ((name.replace("_", " "), one) for name, one in value.items())
        return "; ".join(f"{name}: {_text(one)}" for name, one in named)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
