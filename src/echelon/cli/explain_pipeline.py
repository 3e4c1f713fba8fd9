"""`echelon explain pipeline`: what each schedule waits for and holds, and which to take.

Every number is a closed form of a builder (`schedule/build.py`), every formula is what that
builder's method says of itself, and the table of old weights is counted by `schedule/staleness.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from inspect import cleandoc
from typing import Any

from echelon.cli.output import table
from echelon.cli.pipeline_size import require_size
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.builder import ActionTimes, Builder
from echelon.schedule.gpipe import GPipe
from echelon.schedule.one_f_one_b import OneFOneB
from echelon.schedule.staleness import DISCIPLINES, gives_reference_gradient, staleness

DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8
SMALL_TABLE = 64
"""Up to so many ranks weights are counted action by action; more say nothing new."""

WHEN = {
    "naive": "to look for a fault: one rank works at a time, nothing overlaps",
    "gpipe": "few microbatches (it takes any number), or all of them fit in memory",
    "1f1b": "the start: few messages, and activations that do not grow with m",
    "interleaved-1f1b": "m is small beside p and links are fast: v times the messages",
    "breadth-first": "stages are gathered or summed over data ranks: each is used in one run",
    "zb-h1": "1f1b's activations fit, nothing more; W fills what 1f1b waits",
    "zb-h2": "activations are cheap: up to 2p-1 microbatches are held",
    "zb-v": "W is about as long as F and B; the embedding and the head share rank 0",
    "dualpipe": "the parameters fit twice; sums over mirrored ranks come on top",
    "dualpipe-v": "as dualpipe, with one copy of the parameters",
}
"""When a schedule is the one to take, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Hold what the closed forms of a schedule give.

    `idle` is in forward passes of all stages of a rank, `held` in microbatches of all of them.
    """

    name: str
    builder: Builder
    idle: float
    overhead: float
    fraction: float
    held: float
    num_messages: int

    @classmethod
    def of(cls, builder: Builder) -> Fact:
        """Return the facts of a builder: F = B = W, cut among the stages of a rank."""
        per_rank = builder.num_stages // builder.num_ranks
        one = Fraction(1, per_rank)
        times = ActionTimes(
            forward_s=float(one), input_gradient_s=float(one), weight_gradient_s=float(one)
        )
        peak = max(builder.peak_in_flight_of_rank(rank) for rank in range(builder.num_ranks))
        return cls(
            name=builder.name,
            builder=builder,
            idle=builder.idle_s(times),
            overhead=builder.bubble_overhead(),
            fraction=builder.bubble_fraction(),
            held=float(peak * one),
            num_messages=builder.num_messages(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineQuestion:
    """Hold what was asked, the schedules that fit, and why the others do not."""

    num_ranks: int
    num_microbatches: int
    facts: tuple[Fact, ...]
    refused: tuple[tuple[str, str, str], ...]


def ask_pipeline(*, pp: int | None, microbatches: int | None) -> PipelineQuestion:
    """Return the question; ConfigError with a number out of range."""
    p = DEFAULT_RANKS if pp is None else pp
    m = max(1, p * DEFAULT_MICROBATCHES // DEFAULT_RANKS) if microbatches is None else microbatches
    require_size(pp=p, microbatches=m)
    facts: list[Fact] = []
    refused: list[tuple[str, str, str]] = []
    for name, kind in SCHEDULES.items():
        stages = kind.stages_for(p, kind.default_virtual_stages)
        found = schedule_problems(name, num_stages=stages, num_ranks=p, num_microbatches=m)
        if found:
            refused.append((name, found[0].rule, found[0].message))
        else:
            facts.append(Fact.of(kind(num_stages=stages, num_ranks=p, num_microbatches=m)))
    return PipelineQuestion(
        num_ranks=p, num_microbatches=m, facts=tuple(facts), refused=tuple(refused)
    )


def pipeline_json(question: PipelineQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    return {
        "num_ranks": question.num_ranks,
        "num_microbatches": question.num_microbatches,
        "schedules": [
            {
                "name": fact.name,
                "paper": fact.builder.paper,
                "num_stages": fact.builder.num_stages,
                "idle_forward_passes": fact.idle,
                "bubble_overhead": fact.overhead,
                "bubble_fraction": fact.fraction,
                "held_microbatches": fact.held,
                "num_messages": fact.num_messages,
            }
            for fact in question.facts
        ],
        "refused": [
            {"name": n, "rule": rule, "message": text} for n, rule, text in question.refused
        ],
        "staleness": _staleness_json(question),
    }


def pipeline_text(question: PipelineQuestion) -> str:
    """Return the page that a person reads."""
    p, m = question.num_ranks, question.num_microbatches
    parts = [
        f"A pipeline of p = {p} ranks, m = {m} microbatches a step. F is a forward pass, B the "
        "gradient of its\ninput, W that of its weights, BW both. Closed forms for F = B = W, equal "
        "stages and free transfers:",
        _facts(question),
    ]
    if question.refused:
        lines = [f"{name}: {message} [{rule}]" for name, rule, message in question.refused]
        parts.append("Not with these numbers:\n\n" + "\n".join(f"  {line}" for line in lines))
    parts += [
        "\n".join(_legend()),
        "Which to take\n\n" + "\n".join(_choice(question)),
        "Where the numbers come from\n\n" + "\n".join(_formulas()),
        "Without a flush: PipeDream\n\n" + "\n".join(_stale(question)),
        "For your own model, with its own times and links: echelon plan RUN --set "
        "pipeline.schedule=NAME\nDrawn: echelon schedule show NAME "
        f'-p {p} -m {m}      searched: pipeline.schedule = "auto"',
    ]
    return "\n\n".join(parts) + "\n"


def _facts(question: PipelineQuestion) -> str:
    rows = [
        (
            fact.name,
            fact.builder.num_stages // fact.builder.num_ranks,
            f"{fact.idle:.4g} F",
            f"{100 * fact.overhead:.1f} %",
            f"{100 * fact.fraction:.1f} %",
            f"{fact.held:.4g}",
            2 if fact.builder.mirrored() else 1,
            fact.num_messages,
        )
        for fact in question.facts
    ]
    head = ("schedule", "v", "rank waits", "overhead", "fraction", "holds", "copies", "messages")
    return table(head, rows)


def _legend() -> Iterator[str]:
    yield "v         stages on a rank"
    yield "waits     what each rank waits in a step, in forward passes of all its stages"
    yield "overhead  waiting / working (Narayanan et al. 2021)"
    yield "fraction  waiting / step (GPipe)"
    yield "holds     the most that a rank holds from F to W, in microbatches of all its stages"
    yield "copies    of the parameters over the pipeline"
    yield "messages  between ranks in a step, activations and gradients"


def _choice(question: PipelineQuestion) -> Iterator[str]:
    """Yield when a schedule is worth it, then what these numbers say."""
    width = max(map(len, WHEN))
    for name in SCHEDULES:
        yield f"  {name:<{width}}  {WHEN[name]}"
    yield f"  {'auto':<{width}}  stages or transfers are unequal, or memory is none of the above"
    yield ""
    yield from (f"  {line}" for line in _verdicts(question))


def _verdicts(question: PipelineQuestion) -> Iterator[str]:
    p, m, facts = question.num_ranks, question.num_microbatches, question.facts
    by_name = {fact.name: fact for fact in facts}
    yield f"Here the least waiting: {_least(facts)}"
    usual = by_name.get(OneFOneB.name)
    if usual is not None:
        within = [fact for fact in facts if fact.held <= usual.held]
        yield f"of those that hold no more than {usual.name} ({usual.held:g}): {_least(within)}"
        gpipe = by_name[GPipe.name]
        yield (
            f"{gpipe.name} waits as long as {usual.name} and holds "
            f"{gpipe.held / usual.held:.3g} times as much"
        )
        least = 4 * p
        many = OneFOneB(num_stages=p, num_ranks=p, num_microbatches=least)
        yield (
            f"m >= 4p is the usual advice: with m = {least}, {usual.name} waits "
            f"{100 * many.bubble_fraction():.1f} % of the step (here m = {m / p:.3g} p: "
            f"{100 * usual.fraction:.1f} %)"
        )


def _least(facts: list[Fact] | tuple[Fact, ...]) -> str:
    """Return the name, or names, of the smallest bubble."""
    smallest = min(fact.fraction for fact in facts)
    names = [fact.name for fact in facts if fact.fraction == smallest]
    return f"{', '.join(names)} ({100 * smallest:.1f} % of the step)"


def _formulas() -> Iterator[str]:
    for name, kind in SCHEDULES.items():
        yield f"  {name}: {kind.paper}"
        own = "peak_in_flight_of_rank" in vars(kind)
        peak = kind.peak_in_flight_of_rank if own else kind.peak_in_flight
        yield from _said("waits", kind.idle_s.__doc__)
        yield from _said("holds", peak.__doc__)
        paper = getattr(kind, "paper_bubble_s", None)
        if paper is not None:
            yield from _said("paper", paper.__doc__)


def _said(title: str, docstring: str | None) -> Iterator[str]:
    text = cleandoc(docstring or "").removeprefix("Return ")
    lines = text.replace("`idle_s`", "waits").replace("`paper_bubble_s`", "paper").splitlines()
    for number, line in enumerate(line for line in lines if line):
        yield f"    {title if number == 0 else '':<7}{line}"


def _staleness_json(question: PipelineQuestion) -> list[dict[str, Any]]:
    p, m = _counted(question)
    found = [(one, staleness(one, num_ranks=p, num_microbatches=m)) for one in DISCIPLINES]
    return [
        {
            "name": one.name,
            "source": one.source,
            "stages": [
                {"staleness": s.staleness, "kept": s.kept, "is_gradient": s.is_gradient}
                for s in stages
            ],
            "reference_gradient": gives_reference_gradient(stages),
        }
        for one, stages in found
    ]


def _counted(question: PipelineQuestion) -> tuple[int, int]:
    p = min(question.num_ranks, SMALL_TABLE)
    return p, min(max(question.num_microbatches, p), 2 * SMALL_TABLE)


def _stale(question: PipelineQuestion) -> Iterator[str]:
    """Yield the table of old weights, and what follows for a run."""
    p, m = _counted(question)
    rows: list[tuple[object, ...]] = []
    for one in DISCIPLINES:
        stages = staleness(one, num_ranks=p, num_microbatches=m)
        kept = [stage.kept for stage in stages]
        gradient = all(stage.is_gradient for stage in stages)
        same = gives_reference_gradient(stages)
        rows.append(
            (
                one.name,
                "each step" if one.whole_steps else "each microbatch",
                _span([stage.staleness for stage in stages]),
                _span(kept),
                "of one device" if same else "of older weights" if gradient else "of no weights",
                one.source,
            )
        )
    yield f"  Weights could change while microbatches are in flight. On p = {p} stages, counted:"
    yield ""
    head = ("", "weights change", "updates late", "versions kept", "gradient", "source")
    yield from (f"  {line}" for line in table(head, rows).splitlines())
    yield ""
    yield "  a..b: from the first stage to the last. Every schedule of the table above has a flush:"
    yield "  only with one is the gradient that of one device, so nothing else can be planned,"
    yield "  proven or trained here."


def _span(values: list[int]) -> str:
    first, last = values[0], values[-1]
    return str(first) if first == last else f"{first}..{last}"
