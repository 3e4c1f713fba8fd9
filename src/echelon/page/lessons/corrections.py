"""Where a published guide was wrong: the errata, as a lesson shows them."""

from __future__ import annotations

from echelon.handbook.errata.claims import PublishedClaim, all_claims
from echelon.page.lessons.lesson import Correction


def corrections(*ids: str) -> tuple[Correction, ...]:
    """Return the corrections of claims by their ids; KeyError for an id that is no claim's."""
    known = {claim.id: claim for claim in all_claims()}
    return tuple(_correction(known[claim]) for claim in ids)


def _correction(claim: PublishedClaim) -> Correction:
    said = claim.claim if claim.said is None else f"{claim.claim} ({_text(claim.said)})"
    holds = f"{_text(claim.holds)}. {claim.why}" if claim.why else _text(claim.holds)
    return Correction(id=claim.id, said=said, holds=holds)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
