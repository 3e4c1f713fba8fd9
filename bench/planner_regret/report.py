"""How far predictions are from measured steps, and what it costs to take the planner's word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median

from echelon.core.plan import Plan
from echelon.cost.fit.runs import plan_label

WITHIN, MIDDLE_WITHIN, REGRET_WITHIN = 0.12, 0.06, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold a plan, its predicted and measured seconds, and whether it was drawn at random."""

    plan: Plan
    predicted_s: float
    measured_s: float
    drawn: bool

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sum up the errors of the drawn plans, and the regret over all.

    `regret` is how much longer the plan that is predicted to be the fastest takes than the one that
    was: over all plans, and by the number of ranks. `in_order` is the share of pairs of drawn plans
    of which the one that is predicted to be faster was.
    """

    mean: float
    median: float
    worst: float
    in_order: float
    regret: float
    regret_of: dict[int, float]

    @property
    def missed(self) -> list[str]:
        """Return what is over its limit, in words."""
        limits = (
            ("largest error", self.worst, WITHIN),
            ("median error", self.median, MIDDLE_WITHIN),
            ("regret", self.regret, REGRET_WITHIN),
        )
        return [
            f"{name} {value:.1%}, wanted {limit:.0%}"
            for name, value, limit in limits
            if value > limit
        ]


def summary(rows: Sequence[Measured]) -> Summary:
    """Return the summary of some measured plans; at least two were drawn."""
    drawn = [one for one in rows if one.drawn]
    errors = [abs(one.error) for one in drawn]
    pairs = list(combinations(drawn, 2))
    right = [(a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) >= 0 for a, b in pairs]
    worlds = sorted({one.plan.mesh.world_size for one in rows})
    by_world = {n: [one for one in rows if one.plan.mesh.world_size == n] for n in worlds}
    return Summary(
        mean=mean(errors),
        median=median(errors),
        worst=max(errors),
        in_order=mean(right),
        regret=regret(rows),
        regret_of={world: regret(some) for world, some in by_world.items()},
    )


def regret(rows: Sequence[Measured]) -> float:
    """Return how much longer than the fastest plan the one takes that is predicted to be it."""
    chosen = min(rows, key=lambda one: one.predicted_s)
    return chosen.measured_s / min(one.measured_s for one in rows) - 1.0


def text(rows: Sequence[Measured]) -> str:
    """Return every plan, slowest last, and the summary; a star is the planner's own plan."""
    lines = [f"{'plan':44} {'measured':>9} {'predicted':>10} {'off':>8}"]
    for one in sorted(rows, key=lambda row: row.measured_s):
        name = plan_label(one.plan) + ("" if one.drawn else " *")
        lines.append(
            f"{name:44.44} {one.measured_s:7.3f} s {one.predicted_s:8.3f} s {one.error:+8.1%}"
        )
    found = summary(rows)
    lines += [
        "",
        f"error of {sum(one.drawn for one in rows)} plans drawn: mean {found.mean:.1%}, "
        f"median {found.median:.1%}, largest {found.worst:.1%}",
        f"pairs in the right order: {found.in_order:.1%}",
        f"regret of the plan ranked first: {found.regret:.1%}; of so many ranks: "
        + ", ".join(f"{world}: {value:.1%}" for world, value in found.regret_of.items()),
    ]
    return "\n".join(lines)
