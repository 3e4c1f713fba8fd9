"""What is wrong where ranks decide otherwise than one device on a scale or on skipping a step."""

from __future__ import annotations

from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import furthest, known_factors, name_factor
from echelon.prove.places import narrowed


def explain_scale(evidence: Evidence, step: int) -> tuple[Finding, tuple[int, ...]]:
    """Return who missed an overflow, or skipped a step without one, or scaled otherwise."""
    plan, oracle = evidence.plan, evidence.oracle[step]
    reports = evidence.observed.reports(step)
    wrong = tuple(
        rank for rank, one in enumerate(reports) if one.skipped not in (None, oracle.skipped)
    )
    if wrong:
        everyone = range(len(reports))
        if oracle.skipped:
            some = len(wrong) < len(reports)
            says = "updates in a step whose gradients overflowed"
            says += ", which other ranks skip" if some else ""
            factor = "overflow not agreed" if some else "overflow missed"
        else:
            factor, says = "skipped", "skips a step in which nothing overflowed"
        return narrowed(plan, Finding(factor=factor, says=says), wrong, everyone), wrong
    scales = [one.loss_scale for one in reports if one.loss_scale is not None]
    value = furthest(scales, oracle.loss_scale)
    ranks = tuple(rank for rank, one in enumerate(reports) if one.loss_scale == value)
    named = name_factor(value / oracle.loss_scale, known_factors(plan, oracle))
    return narrowed(plan, named, ranks, range(len(reports))), ranks
