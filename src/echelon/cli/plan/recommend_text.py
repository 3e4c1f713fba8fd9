"""What `echelon plan --cluster` prints first: the plan to run, why, what else there is, what next.

It is a page of about twenty lines; `--detail` adds the plans of the search, and every term of the
first (`search_text.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from echelon.cli.output import WIDTH, fit_page, table
from echelon.cli.plan.expected_text import expected_line
from echelon.cli.plan.search_text import mesh_text, recompute_text, schedule_text
from echelon.core.parameters import num_parameters
from echelon.core.units import short_count
from echelon.planner.explain.bands import held_bytes_band, price_band, step_band
from echelon.planner.predict.estimate import Estimate
from echelon.planner.recommend.device_counts import may_idle
from echelon.planner.recommend.recommend import SURE, PreferredPlan, Recommendation, noise
from echelon.planner.recommend.simplicity import splitting_axes
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.ranked import expected_of_request

_LABEL = 10  # columns
_TOLD_TERMS = 3  # terms
_LEAST_TOLD = 0.05  # of a step


def recommendation_text(found: Recommendation, command: str) -> str:
    """Return the page of a recommendation; `command` is what the user asked for it with."""
    lines = [*_head(found), "", *_answer(found), ""]
    if found.others:
        lines += [_others_table(found), ""]
    return fit_page("\n".join([*lines, *_next(found, command)])) + "\n"


def plan_words(choice: CandidatePlan) -> str:
    """Return every choice of a plan that is not plain, as ``pp4 dp2 tp8s, ZeRO 1, 1f1b``."""
    words = [mesh_text(choice), f"ZeRO {choice.zero}"]
    if choice.mesh.pp > 1:
        words.append(schedule_text(choice))
    words.append(f"microbatches of {choice.microbatch}")
    if choice.recompute:
        again = recompute_text(choice)
        words.append("all blocks recomputed" if again == "all" else f"{again} of blocks recomputed")
    if choice.offload:
        words.append("optimizer state on the host")
    return ", ".join(words)


def percent_of_fit(fits: float) -> str:
    """Return a probability in percent, never as certain."""
    return ">99 %" if fits > 0.99 else "<1 %" if fits < 0.01 else f"{100 * fits:.0f} %"


def _head(found: Recommendation) -> Iterator[str]:
    request = found.answer.request
    model, numbers, cluster = request.model, request.mathematics, request.cluster
    yield _line(
        "model",
        f"{model.name}, {short_count(num_parameters(model))} parameters, on {cluster.num_devices:,}"
        f" x {cluster.device.name}, by {request.trainer}",
    )
    yield _line(
        "batch",
        f"{numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens, parameters "
        f"in {numbers.precision.parameters}",
    )
    if request.defaults_taken:
        yield _line("assumed", "; ".join(request.defaults_taken))
    if request.pins.texts:
        yield _line("pinned", ", ".join(request.pins.texts.values()))


def _answer(found: Recommendation) -> Iterator[str]:
    request, first = found.answer.request, found.first
    choice, estimate = first.ranked.candidate, first.ranked.estimate
    step, held = step_band(estimate), held_bytes_band(estimate)
    yield _line("run", plan_words(choice))
    idle = request.cluster.num_devices - choice.devices
    if idle > 0 and may_idle(request):
        told = f"{idle:,} of {request.cluster.num_devices:,} devices"
        reason = "no plan on all of them is faster and as sure to fit"
        if request.objective == "expected":
            reason = "no long run on all of them is done earlier; they are spare"
        yield _line("idle", f"{told}: {reason}")
    yield _line(
        "step",
        f"{step.value:.4g} s ({step.low:.4g} to {step.high:.4g}), "
        f"{estimate.tokens_per_s_per_device:.0f} tokens/s of a device, "
        f"MFU {100 * estimate.mfu:.1f}",
    )
    yield _line(
        "memory",
        f"{held.value / 1e9:.1f} of {request.memory_bytes / 1e9:.1f} GB ({held.low / 1e9:.1f} to "
        f"{held.high / 1e9:.1f}); fits: {percent_of_fit(first.fits)}",
    )
    if request.objective == "expected":
        yield _line("expected", expected_line(expected_of_request(request, estimate)))
    if request.price is not None:
        price = price_band(estimate, request.price)
        yield _line(
            "price",
            f"{price.value:.4g} ({price.low:.4g} to {price.high:.4g}) for a million tokens",
        )
    yield _line("why", " ".join(_reasons(found)))
    yield _line("binds", _binds(estimate))


def _reasons(found: Recommendation) -> Iterator[str]:
    axes = splitting_axes(found.first.ranked.candidate)
    split = f"it splits the model over {' and '.join(axes)}" if axes else "no axis splits the model"
    yield (
        f"The simplest plan within {100 * noise():.0f} % of the fastest, which predictions cannot "
        f"tell apart: {split}."
    )
    if found.answer.offload:
        yield (
            "Optimizer state rests on the host: without, nothing fits, or what fits is slower than "
            "fewer devices are; over PCIe 4.0, assumed."
        )
    if not found.sure:
        yield f"No plan fits with a probability of {100 * SURE:.0f} %: try a short run first."


def _binds(estimate: Estimate) -> str:
    """Return the largest terms of a step, each with its share of it."""
    whole = estimate.step_s
    largest = sorted(estimate.seconds.items(), key=lambda term: -term[1])
    told = [(name, s / whole) for name, s in largest[:_TOLD_TERMS] if s >= _LEAST_TOLD * whole]
    return "of a step " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in told)


def _others_table(found: Recommendation) -> str:
    first = found.first.ranked.estimate
    rows = [_other_row(one, first) for one in found.others]
    return table(("preferred", "plan", "step", "GB", "fits", "tokens/s"), rows, WIDTH)


def _other_row(one: PreferredPlan, first: Estimate) -> tuple[str, ...]:
    choice, estimate = one.ranked.candidate, one.ranked.estimate
    devices = "" if choice.devices == first.devices else f"{choice.devices:,}: "
    zero = f"zero{choice.zero}" + "+h" * choice.offload
    again = "" if not choice.recompute else f" rec {recompute_text(choice)}"
    return (
        ", ".join(one.preferred_for),
        f"{devices}{mesh_text(choice)} {zero}{again}",
        f"{100 * (estimate.step_s / first.step_s - 1):+.1f} %",
        f"{estimate.bytes_held / 1e9:.1f}",
        percent_of_fit(one.fits),
        f"{estimate.tokens_per_s_per_device:.0f}",
    )


def _next(found: Recommendation, command: str) -> Iterator[str]:
    yield _line("next", f"{command} --out run.toml, then echelon prove run.toml")
    count = len(found.answer.ranked)
    yield _line("more", f"--detail: {count} plans and every term; --why: what else was looked at")
    yield _line(
        "searched", f"{found.answer.num_legal:,} legal plans in {found.answer.seconds:.1f} s"
    )


def _line(label: str, text: str) -> str:
    return fill(f"{label:<{_LABEL}}{text}", WIDTH, subsequent_indent=" " * _LABEL)
