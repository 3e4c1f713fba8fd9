"""What the planner thinks of a published choice, and of the plan that it recommends for the run.

Ours is what `echelon plan` answers (`planner/recommend/`): the simplest plan within the noise of
the fastest, which fits with a probability of 0.95. The fastest is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median

from bench.known_answers.answers import Answer
from echelon.core.errors import ConfigError
from echelon.cost.fit.runs import plan_label
from echelon.cost.seconds.kernels import attended_positions, attention_width
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.search import search

UNBOUNDED_BYTES = 2.0**60
"""Memory of a device on which every published choice fits."""
GIB = 2.0**30
MANY = 0.2
"""The regret from which on a published choice needs a named reason."""
USUAL = 0.05
"""What the median regret of published choices is to be at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Hold what was found of a published choice: seconds of a step, bytes of the fullest rank."""

    answer: Answer
    problem: str = ""
    """Why nothing was found; "" where it was."""
    published_s: float = 0.0
    published_bytes: float = 0.0
    published: str = ""
    """The plan in a few words."""
    published_terms: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by term."""
    ours_s: float = 0.0
    """Seconds of the plan that is recommended."""
    ours: str = ""
    ours_terms: dict[str, float] = field(default_factory=dict[str, float])
    fastest_s: float = 0.0
    """Seconds of the fastest plan that is expected to fit."""
    fastest: str = ""
    measured_s: float | None = None
    """None where it is not known."""
    memory_bytes: float = 0.0

    @property
    def regret(self) -> float:
        """Return how much slower the published choice is predicted to be than what we recommend."""
        return self.published_s / self.ours_s - 1.0

    @property
    def regret_of_fastest(self) -> float:
        """Return the same beside the fastest plan."""
        return self.published_s / self.fastest_s - 1.0

    @property
    def fits(self) -> bool:
        """Return whether the published choice fits, by our bytes."""
        return self.published_bytes <= self.memory_bytes

    @property
    def unexplained(self) -> bool:
        """Return whether its regret is large and its row names no reason."""
        return not self.problem and self.regret > MANY and not self.answer.reason


def judge(answer: Answer) -> Judged:
    """Return the prediction of a published choice and of the planner's own."""
    try:
        request = answer.request()
        found = recommend(request)
        published = _published(answer)
    except ConfigError as error:
        return _without(answer, str(error).splitlines()[0])
    if not isinstance(found, Recommendation):
        return _without(answer, "no plan fits")
    if published is None:
        return _without(answer, "no plan has this layout")
    ours, estimate = found.first.ranked, published.estimate
    fastest = next((one.ranked for one in found.others if "fastest" in one.preferred_for), ours)
    shape, length = request.model, request.mathematics.sequence_length
    pairs = 12.0 * shape.layers * attention_width(shape) * attended_positions(shape, length)
    measured = answer.measured_s(estimate.tokens, estimate.model_flops, pairs * estimate.tokens)
    return Judged(
        answer=answer,
        published_s=estimate.step_s,
        published_bytes=estimate.bytes_held,
        published=_label(published),
        published_terms=dict(estimate.seconds),
        ours_s=ours.estimate.step_s,
        ours=_label(ours),
        ours_terms=dict(ours.estimate.seconds),
        fastest_s=fastest.estimate.step_s,
        fastest=_label(fastest),
        measured_s=measured,
        memory_bytes=request.memory_bytes,
    )


def _published(answer: Answer) -> RankedPlan | None:
    """Return the best plan with the published layout: one that fits, else with all recomputed.

    More virtual stages than a search walks are left open: `published` says which were taken.
    """
    request = answer.request(*answer.pins)
    for pins in (request.pins, request.pins.without("virtual")):
        found = search(replace(request, pins=pins)).best
        if found is None:
            full = pins if pins.values_of("recompute") else pins.having("recompute", 1)
            found = search(replace(request.with_memory(UNBOUNDED_BYTES), pins=full)).best
        if found is not None:
            return found
    return None


def _without(answer: Answer, problem: str) -> Judged:
    return Judged(answer=answer, problem=problem)


def _label(one: RankedPlan) -> str:
    label = "" if one.plan is None else plan_label(one.plan)
    ep = one.candidate.mesh.ep
    return f"{label} ep{ep}" if ep > 1 else label


def text_of(one: Judged, *, terms: bool = False) -> str:
    """Return a row in words, a few lines of it."""
    if one.problem:
        return f"{one.answer.name}\n  not judged: {one.problem}"
    held, memory = one.published_bytes / GIB, one.memory_bytes / GIB
    fit = "fits" if one.fits else "does not fit"
    lines = [
        f"{one.answer.name}: regret {one.regret:+.1%}",
        f"  published {one.published_s:8.3f} s  {one.published}; {fit}: {held:.1f} of"
        f" {memory:.1f} GiB",
        f"  ours      {one.ours_s:8.3f} s  {one.ours}",
    ]
    if one.fastest != one.ours:
        lines.append(f"  fastest   {one.fastest_s:8.3f} s  {one.fastest}")
    if one.measured_s is not None:
        off = one.published_s / one.measured_s - 1.0
        lines.append(f"  measured  {one.measured_s:8.3f} s  predicted {off:+.1%}")
    if one.regret > MANY:
        lines.append(f"  reason: {one.answer.reason or 'none is named'}")
    if terms:
        lines += [f"  {line}" for line in _terms(one)]
    return "\n".join(lines)


def _terms(one: Judged) -> list[str]:
    names = list(dict.fromkeys((*one.published_terms, *one.ours_terms)))
    gaps = {n: one.published_terms.get(n, 0.0) - one.ours_terms.get(n, 0.0) for n in names}
    ranked = sorted(names, key=lambda name: -abs(gaps[name]))
    return [
        f"{name:12} {one.published_terms.get(name, 0.0):8.3f} s, ours"
        f" {one.ours_terms.get(name, 0.0):8.3f} s"
        for name in ranked
        if abs(gaps[name]) >= 0.01 * one.ours_s
    ]


def summary(rows: list[Judged]) -> str:
    """Return the median and the largest regret, and what has no reason."""
    judged = [one for one in rows if not one.problem]
    if not judged:
        return "no row could be judged"
    worst = max(judged, key=lambda one: one.regret)
    fitting = sum(one.fits for one in judged)
    lines = [
        f"{len(judged)} of {len(rows)} published choices judged: median regret"
        f" {median(one.regret for one in judged):.1%} (wanted {USUAL:.0%}),"
        f" largest {worst.regret:.1%} ({worst.answer.name})",
        f"beside the fastest plan: median {median(one.regret_of_fastest for one in judged):.1%}",
        f"{fitting} of them fit by our bytes",
    ]
    bare = [one.answer.name for one in judged if one.unexplained]
    if bare:
        lines.append(f"above {MANY:.0%} without a named reason: {', '.join(bare)}")
    return "\n".join(lines)


def missed(rows: list[Judged]) -> bool:
    """Return whether a target is missed, or a row could not be judged."""
    judged = [one for one in rows if not one.problem]
    if len(judged) < len(rows) or any(one.unexplained for one in judged):
        return True
    return not judged or median(one.regret for one in judged) > USUAL
