# SPDX-License-Identifier: Apache-2.0
"""`echelon explain pipeline`: what each schedule waits for and holds, and which to take.

Every number is a closed form of a builder (`schedule/build.py`), every formula is what that
builder's method says of itself, and the table of old weights is counted by `schedule/staleness.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from echelon.cli.schedule.arguments import require_size
from echelon.planner.view.text_layout import WIDTH, table, wrap_text
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.builders.builder import ActionTimes, Builder
from echelon.schedule.builders.gpipe import GPipe
from echelon.schedule.builders.one_f_one_b import OneFOneB
from echelon.schedule.staleness import WEIGHT_UPDATE_RULES, gives_reference_gradient, staleness

DEFAULT_RANKS = 4  # ranks
DEFAULT_MICROBATCHES = 8  # microbatches
SMALL_TABLE = 64
"""Up to so many ranks weights are counted action by action; more say nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineQuestion:
    """Hold what was asked, the schedules that fit, and why the others do not."""

    num_ranks: int
    num_microbatches: int
    builders: tuple[Builder, ...]
    refused: tuple[tuple[str, str, str], ...]


def ask_pipeline(*, pp: int | None = None, microbatches: int | None = None) -> PipelineQuestion:
    """Return the question; ConfigError with a number out of range."""
    p = DEFAULT_RANKS if pp is None else pp
    m = max(1, p * DEFAULT_MICROBATCHES // DEFAULT_RANKS) if microbatches is None else microbatches
    require_size(pp=p, microbatches=m)
    builders: list[Builder] = []
    refused: list[tuple[str, str, str]] = []
    for name, kind in SCHEDULES.items():
        stages = kind.stages_for(p, kind.default_virtual_stages)
        found = schedule_problems(name, num_stages=stages, num_ranks=p, num_microbatches=m)
        if found:
            refused.append((name, found[0].rule, found[0].message))
        else:
            builders.append(kind(num_stages=stages, num_ranks=p, num_microbatches=m))
    return PipelineQuestion(
        num_ranks=p, num_microbatches=m, builders=tuple(builders), refused=tuple(refused)
    )


def pipeline_json(question: PipelineQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    return {
        "num_ranks": question.num_ranks,
        "num_microbatches": question.num_microbatches,
        "schedules": [
            {
                "name": one.name,
                "paper": one.paper,
                "num_stages": one.num_stages,
                "idle_forward_passes": _idle(one),
                "bubble_overhead": one.bubble_overhead(),
                "bubble_fraction": one.bubble_fraction(),
                "held_microbatches": _held(one),
                "num_messages": one.num_messages(),
            }
            for one in question.builders
        ],
        "refused": [
            {"name": n, "rule": rule, "message": text} for n, rule, text in question.refused
        ],
        "staleness": _staleness_json(question),
    }


def pipeline_text(question: PipelineQuestion, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    p, m = question.num_ranks, question.num_microbatches
    parts = [
        f"A pipeline of p = {p} ranks, m = {m} microbatches a step. F is a forward pass, B the "
        "gradient of its input, W that of its weights, BW both. Closed forms for F = B = W, equal "
        "stages and free transfers:",
        _facts(question, columns=columns),
    ]
    if question.refused:
        lines = [f"{name}: {message} [{rule}]" for name, rule, message in question.refused]
        parts.append("Not with these numbers:\n\n" + "\n".join(f"  {line}" for line in lines))
    parts += [
        LEGEND,
        "Which to take\n\n" + "\n".join(_choice(question)),
        "Where the numbers come from\n\n" + "\n".join(_formulas(columns)),
        "Without a flush: PipeDream\n\n" + "\n".join(_stale(question, columns=columns)),
        "For your own model, with its own times and links: echelon plan RUN --set "
        "pipeline.schedule=NAME\nDrawn: echelon schedule show NAME "
        f'-p {p} -m {m}      searched: pipeline.schedule = "auto"',
    ]
    return "\n\n".join(parts) + "\n"


def _idle(builder: Builder) -> float:
    """Return how long a rank idles, in forward passes of all its stages; F = B = W."""
    one = builder.num_ranks / builder.num_stages
    times = ActionTimes(forward_s=one, input_gradient_s=one, weight_gradient_s=one)
    return builder.idle_s(times)


def _held(builder: Builder) -> float:
    """Return the most that a rank holds, in microbatches of all its stages."""
    peak = max(builder.peak_in_flight_of_rank(rank) for rank in range(builder.num_ranks))
    return peak * builder.num_ranks / builder.num_stages


def _facts(question: PipelineQuestion, *, columns: int) -> str:
    rows = [
        (
            one.name,
            one.num_stages // one.num_ranks,
            f"{_idle(one):.4g} F",
            f"{100 * one.bubble_overhead():.1f} %",
            f"{100 * one.bubble_fraction():.1f} %",
            f"{_held(one):.4g}",
            2 if one.mirrored() else 1,
            one.num_messages(),
        )
        for one in question.builders
    ]
    head = ("schedule", "v", "rank idle", "overhead", "fraction", "holds", "copies", "messages")
    return table(head, rows, columns=columns)


LEGEND = """\
v         stages on a rank
idle      how long each rank idles in a step, in forward passes of all its stages
overhead  idle / busy (Narayanan et al. 2021)
fraction  idle / step (GPipe)
holds     the most that a rank holds from F to W, in microbatches of all its stages
copies    of the parameters over the pipeline
messages  between ranks in a step, activations and gradients"""


def _choice(question: PipelineQuestion) -> Iterator[str]:
    """Yield when a schedule is worth it, then what these numbers say."""
    width = max(map(len, SCHEDULES))
    for name, kind in SCHEDULES.items():
        yield f"  {name:<{width}}  {kind.suits}"
    yield f"  {'auto':<{width}}  stages or transfers are unequal, or memory is none of the above"
    yield ""
    yield from (f"  {line}" for line in _verdicts(question))


def _verdicts(question: PipelineQuestion) -> Iterator[str]:
    p, m = question.num_ranks, question.num_microbatches
    by_name = {one.name: one for one in question.builders}
    yield f"Here the smallest bubble: {_least(question.builders)}"
    usual = by_name.get(OneFOneB.name)
    if usual is not None:
        held = _held(usual)
        within = [one for one in question.builders if _held(one) <= held]
        yield f"of those that hold no more than {usual.name} ({held:g}): {_least(within)}"
        gpipe = by_name[GPipe.name]
        yield (
            f"{gpipe.name} idles as long as {usual.name} and holds "
            f"{_held(gpipe) / held:.3g} times as much"
        )
        least = 4 * p
        many = OneFOneB(num_stages=p, num_ranks=p, num_microbatches=least)
        yield (
            f"m >= 4p is the usual advice: with m = {least}, {usual.name} idles "
            f"{100 * many.bubble_fraction():.1f} % of the step (here m = {m / p:.3g} p: "
            f"{100 * usual.bubble_fraction():.1f} %)"
        )


def _least(builders: Sequence[Builder]) -> str:
    """Return the name, or names, of the smallest bubble."""
    smallest = min(one.bubble_fraction() for one in builders)
    names = [one.name for one in builders if one.bubble_fraction() == smallest]
    return f"{', '.join(names)} ({100 * smallest:.1f} % of the step)"


def _formulas(columns: int) -> Iterator[str]:
    for name, kind in SCHEDULES.items():
        yield f"  {name}: {kind.paper}"
        own = "peak_in_flight_of_rank" in vars(kind)
        peak = kind.peak_in_flight_of_rank if own else kind.peak_in_flight
        yield from _said("idle", kind.idle_s.__doc__, columns)
        yield from _said("holds", peak.__doc__, columns)
        paper = getattr(kind, "paper_bubble_s", None)
        if paper is not None:
            yield from _said("paper", paper.__doc__, columns)


def _said(title: str, docstring: str | None, columns: int) -> Iterator[str]:
    text = cleandoc(docstring or "").removeprefix("Return ")
    text = text.replace("`idle_s`", "idle").replace("`paper_bubble_s`", "paper")
    head = f"    {title:<7}"
    for part in text.split("\n\n"):
        yield from wrap_text(" ".join(part.split()), head, " " * 11, columns=columns)
        head = " " * 11


def _staleness_json(question: PipelineQuestion) -> list[dict[str, Any]]:
    p, m = _counted(question)
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
        for one in WEIGHT_UPDATE_RULES
        for stages in [staleness(one, num_ranks=p, num_microbatches=m)]
    ]


def _counted(question: PipelineQuestion) -> tuple[int, int]:
    p = min(question.num_ranks, SMALL_TABLE)
    return p, min(max(question.num_microbatches, p), 2 * SMALL_TABLE)


def _stale(question: PipelineQuestion, *, columns: int) -> Iterator[str]:
    """Yield the table of old weights, and what follows for a run."""
    p, m = _counted(question)
    rows: list[tuple[object, ...]] = []
    for one in WEIGHT_UPDATE_RULES:
        stages = staleness(one, num_ranks=p, num_microbatches=m)
        gradient = "of older weights" if all(s.is_gradient for s in stages) else "of no weights"
        when = "each step" if one.whole_steps else "each microbatch"
        late, kept = _span([s.staleness for s in stages]), _span([s.kept for s in stages])
        same = gives_reference_gradient(stages)
        rows.append((one.name, when, late, kept, "of one device" if same else gradient, one.source))
    yield f"  Weights could change while microbatches are in flight. On p = {p} stages, counted:"
    yield ""
    head = ("", "weights change", "updates late", "versions kept", "gradient", "source")
    yield from (f"  {line}".rstrip() for line in table(head, rows, columns - 2).splitlines())
    yield ""
    last = (
        "a..b: from the first stage to the last. Every schedule of the table above has a flush: "
        "only with one is the gradient that of one device, so nothing else can be planned, "
        "proven or trained here."
    )
    yield from wrap_text(last, "  ", "  ", columns=columns)


def _span(values: list[int]) -> str:
    first, last = values[0], values[-1]
    return str(first) if first == last else f"{first}..{last}"
