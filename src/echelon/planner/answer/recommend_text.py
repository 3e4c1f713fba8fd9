# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan --cluster` prints first: the plan to run, why, what else there is, what next.

It is a page of about twenty lines, and what `print` shows of the answer in Python; `--detail` adds
the plans of the search, and every term of the first (`search_text.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.parameters import parameters_text
from echelon.core.units import binary_bytes, decimal_bytes, gib
from echelon.interop.tools import Tool, tool_of_trainer
from echelon.planner.answer.legend import (
    PlanWord,
    mesh_words,
    row_words,
    schedule_word,
    sentence_words,
    sign_texts,
    words_text,
)
from echelon.planner.answer.objectives import expected_line, longest_facts
from echelon.planner.predict.bands import (
    band_evidence,
    fit_probability,
    held_bytes_band,
    price_band,
    step_band,
)
from echelon.planner.predict.estimate import Estimate
from echelon.planner.recommend.device_counts import may_idle
from echelon.planner.recommend.recommend import (
    SURE,
    PreferredPlan,
    Recommendation,
    WithoutHost,
    noise,
)
from echelon.planner.report.estimate import has_driver, mfu_text, price_text
from echelon.planner.search.candidate import CandidatePlan, splitting_axes
from echelon.planner.search.options import MOST_STAGE
from echelon.planner.search.ranked import expected_of_request
from echelon.planner.search.request import SearchRequest
from echelon.planner.view.text_layout import WIDTH, fill_text, fit_page, table

_LABEL = 10  # columns
_TOLD_TERMS = 3  # terms
_LEAST_TOLD = 0.05  # of a step


def recommendation_text(found: Recommendation, command: str | None, *, columns: int = WIDTH) -> str:
    """Return the page of a recommendation; `command` is what asked for it, None in Python."""
    heading = heading_text(found.answer.request, columns=columns)
    return f"{heading}\n{advice_text(found, command, columns=columns)}"


def heading_text(request: SearchRequest, *, columns: int = WIDTH) -> str:
    """Return the first lines of a page: what was asked for, known before anything is searched."""
    lines = [_line(*fact, columns=columns) for fact in run_facts(request)]
    return fit_page("\n".join(lines), columns=columns) + "\n"


def advice_text(found: Recommendation, command: str | None, *, columns: int = WIDTH) -> str:
    """Return the rest of a page: what to run, and why."""
    lines = [*(_line(*fact, columns=columns) for fact in answer_facts(found)), ""]
    if found.others:
        lines.append(table(OTHERS_HEADER, other_rows(found), columns))
    signs = " ".join(other_signs(found))
    # Signs stand below the table that has them.
    lines += [_line("signs", signs, columns=columns)] if signs else [""] * bool(found.others)
    lines += [_line(*fact, columns=columns) for fact in next_facts(found, command)]
    return fit_page("\n".join(lines), columns=columns) + "\n"


def plan_words(choice: CandidatePlan) -> str:
    """Return every choice of a plan that is not plain, as ``pp4 dp2 tp8s, ZeRO 1, 1f1b``."""
    words = [words_text(mesh_words(choice)), f"ZeRO {choice.zero}"]
    if choice.zero == MOST_STAGE and not choice.reshard:
        words.append("parameters whole after forward")
    if choice.mesh.pp > 1:
        words.append(schedule_word(choice).text)
    words.append(f"microbatches of {choice.microbatch}")
    if choice.recompute:
        share = "all" if choice.recompute == 1 else f"1/{choice.recompute} of"
        words.append(f"{share} blocks recomputed")
    if choice.operators:
        rest = " of the rest" if choice.recompute else ""
        words.append(f"{' and '.join(choice.operators)}{rest} recomputed")
    if choice.keeps_slices:
        words.append("secondary slices in nodes")
    words += [f"{key} = {value}" for key, value in choice.rounding.settings().items()]
    if choice.offload:
        words.append("optimizer state on the host")
    return ", ".join(words)


def percent_of_fit(fits: float) -> str:
    """Return a probability in percent, never as certain."""
    return ">99 %" if fits > 0.99 else "<1 %" if fits < 0.01 else f"{100 * fits:.0f} %"


def run_facts(request: SearchRequest) -> Iterator[tuple[str, str]]:
    """Yield what was asked for: a word, and what is to be said of it."""
    model, numbers, cluster = request.model, request.mathematics, request.cluster
    yield (
        "model",
        f"{model.name}, {parameters_text(model)}, on {cluster.num_devices:,} x "
        f"{cluster.device.name}, by {request.trainer}",
    )
    yield (
        "batch",
        f"{numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens, parameters "
        f"in {numbers.precision.parameters}",
    )
    if request.defaults_taken:
        yield ("assumed", "; ".join(request.defaults_taken))
    if request.pins.texts:
        yield ("pinned", ", ".join(request.pins.texts.values()))


def answer_facts(found: Recommendation) -> Iterator[tuple[str, str]]:
    """Yield what is recommended, and why: a word, and what is to be said of it."""
    request, first = found.answer.request, found.first
    choice, estimate = first.ranked.candidate, first.ranked.estimate
    step, held = step_band(estimate), held_bytes_band(estimate)
    if found.longest is not None:
        yield from longest_facts(found.longest)
    yield ("run", plan_words(choice))
    idle = request.cluster.num_devices - choice.devices
    if idle > 0 and may_idle(request):
        told = f"{idle:,} of {request.cluster.num_devices:,} devices"
        reason = "no plan on all of them is as simple, as fast and as sure to fit"
        if request.objective == "expected":
            reason = "no long run on all of them is done earlier; they are spare"
        yield ("idle", f"{told}: {reason}")
    elif idle > 0 or request.objective == "devices":
        fewest = ", the fewest with a plan" * (request.objective == "devices")
        yield ("devices", f"{choice.devices:,} of {request.cluster.num_devices:,}{fewest}")
    yield (
        "step",
        f"{step.value:.4g} s ({step.low:.4g} to {step.high:.4g}), "
        f"{estimate.tokens_per_s_per_device:.0f} tokens/s of a device, "
        f"{mfu_text(estimate)}",
    )
    told = f" allocator's {gib(estimate.allocated_bytes)};" if has_driver(estimate) else ""
    yield (
        "memory",
        f"{gib(held.value)} of {gib(request.memory_bytes)} GiB ({gib(held.low)} to "
        f"{gib(held.high)});{told} fits: {percent_of_fit(first.fits)}",
    )
    if far := band_evidence(estimate.inputs).differences:
        yield ("measured", f"nothing near it: the nearest run was {', '.join(far)}")
    if request.objective == "expected":
        yield ("expected", expected_line(expected_of_request(request, estimate)))
    if request.price is not None:
        price = price_band(estimate, request.price)
        yield "price", price_text(price, estimate.devices, request.cluster.num_devices)
    yield ("why", " ".join(reasons(found)))
    yield ("binds", _binds(estimate))


def reasons(found: Recommendation) -> Iterator[str]:
    """Yield the sentences that say why the plan is recommended."""
    axes = splitting_axes(found.first.ranked.candidate)
    split = f"it splits the model over {' and '.join(axes)}" if axes else "no axis splits the model"
    yield (
        f"The simplest plan within {100 * noise():.0f} % of the fastest, which predictions cannot "
        f"tell apart: {split}."
    )
    if found.without_host is not None:
        yield _host_reason(found.without_host, found.answer.request)
    if not found.sure:
        yield f"No plan fits with a probability of {100 * SURE:.0f} %: try a short run first."


def _host_reason(without: WithoutHost, request: SearchRequest) -> str:
    """Reason for optimizer state on the host: the best plan without it."""
    rate = decimal_bytes(request.cluster.device.host_bandwidth)
    text = f"Optimizer state rests on the host, over a link of {rate}/s"
    if without.time_ratio is not None:
        return f"{text}: without it a step takes {without.time_ratio:.3g} times as long."
    if without.leanest is None:
        return f"{text}: without it no plan is legal."
    estimate, memory = without.leanest.estimate, request.memory_bytes
    held = f"the leanest plan holds {binary_bytes(estimate.bytes_held)}"
    if estimate.bytes_held <= memory:
        fits = percent_of_fit(fit_probability(estimate, memory))
        return f"{text}: without it {held}, which fits with a probability of {fits} only."
    return f"{text}: without it nothing fits: {held}, a device has {binary_bytes(memory)}."


def _binds(estimate: Estimate) -> str:
    """Return the largest terms of a step, each with its share of it."""
    whole = estimate.step_s
    largest = sorted(estimate.seconds.items(), key=lambda term: -term[1])
    told = [(name, s / whole) for name, s in largest[:_TOLD_TERMS] if s >= _LEAST_TOLD * whole]
    return "of a step " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in told)


OTHERS_HEADER = ("preferred", "plan", "step", "GiB", "fits", "tok/s")


def other_rows(found: Recommendation) -> list[tuple[str, ...]]:
    """Return the plans that somebody may prefer, each as a row under `OTHERS_HEADER`."""
    first = found.first.ranked.estimate
    return [_other_row(one, first) for one in found.others]


def other_signs(found: Recommendation) -> Iterator[str]:
    """Yield the meanings of the signs of the plan to run and of `other_rows`."""
    first = found.first.ranked
    words = [*sentence_words(first.candidate)]
    words += [word for one in found.others for word in _other_words(one, first.estimate)]
    return sign_texts(words)


def _other_words(one: PreferredPlan, first: Estimate) -> tuple[PlanWord, ...]:
    choice = one.ranked.candidate
    return row_words(choice, devices=choice.devices != first.devices)


def _other_row(one: PreferredPlan, first: Estimate) -> tuple[str, ...]:
    estimate = one.ranked.estimate
    return (
        ", ".join(one.preferred_for),
        words_text(_other_words(one, first)),
        f"{100 * (estimate.step_s / first.step_s - 1):+.1f} %",
        gib(estimate.bytes_held),
        percent_of_fit(one.fits),
        f"{estimate.tokens_per_s_per_device:.0f}",
    )


def next_commands(command: str, tool: Tool | None) -> tuple[str, ...]:
    """Commands after a search: write the run, prove it, train it or export it to a tool.

    A search names no data: text, a folder of prepared data, or stdlib to try a run out.
    """
    last = "train run.toml --set data.source=PATH"
    if tool is not None:
        last = f"export run.toml --to {tool.name}"
    return f"{command} --out run.toml", "echelon prove run.toml", f"echelon {last}"


def next_facts(found: Recommendation, command: str | None) -> Iterator[tuple[str, str]]:
    """Yield what to do with an answer, at a command line or in Python, and how it was found."""
    tool = tool_of_trainer(found.answer.request.trainer)
    if command is None:
        run = (
            'ec.train(answer, data="PATH")' if tool is None else f'ec.export(answer, "{tool.name}")'
        )
        yield "next", f"ec.prove(answer).require(), then {run}"
        yield "more", "answer.to_frame(): every plan; answer.seconds and .bytes: every term"
    else:
        count = len(found.answer.ranked)
        plans = f"{count} plan{'s' * (count > 1)}"
        yield "next", ", then ".join(next_commands(command, tool))
        yield "more", f"--detail: {plans} and every term; --why: what else was looked at"
    yield "searched", f"{found.answer.num_legal:,} legal plans in {found.answer.seconds:.1f} s"


def _line(label: str, text: str, *, columns: int) -> str:
    return fill_text(f"{label:<{_LABEL}}{text}", rest=" " * _LABEL, columns=columns)
