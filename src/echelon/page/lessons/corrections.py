"""Where a published guide was wrong: the errata, as lessons show them."""

from __future__ import annotations

from echelon.handbook.errata.claims import PublishedClaim, all_claims
from echelon.page.lessons.lesson import Correction


def corrections(*ids: str) -> tuple[Correction, ...]:
    """Return the corrections of claims by their ids; KeyError for an id that is no claim's."""
    known = {claim.id: claim for claim in all_claims()}
    return tuple(correction_of(known[claim]) for claim in ids)


def correction_of(claim: PublishedClaim) -> Correction:
    """Return what a claim says and what holds, in words."""
    said = claim.claim if claim.said is None else f"{claim.claim}: {value_text(claim.said)}"
    holds = f"{value_text(claim.holds)}. {claim.why}" if claim.why else value_text(claim.holds)
    return Correction(id=claim.id, said=said, holds=holds)


def value_text(value: object) -> str:
    """Return a value of a claim for people: its names as words, its parts one by one."""
    if isinstance(value, dict):
        parts = [f"{str(name).replace('_', ' ')} {value_text(one)}" for name, one in value.items()]
        return "; ".join(parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    if isinstance(value, (int, float)):
        return f"{value:,}".removesuffix(".0")
    return str(value)
