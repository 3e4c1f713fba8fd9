# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan --cluster` prints: the best plans, what the first takes, what was seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.core.axis import MESH_AXES
from echelon.core.parameters import parameters_text
from echelon.core.units import decimal_bytes
from echelon.planner.answer.legend import plan_cells, plan_numbers, sign_texts, words_text
from echelon.planner.answer.objectives import expected_lines
from echelon.planner.answer.recommend_text import percent_of_fit
from echelon.planner.predict.bands import (
    fit_probability,
    held_bytes_band,
    price_band,
    step_band,
    tokens_per_s_band,
)
from echelon.planner.report.estimate import byte_terms, price_text, rate_lines, seconds_terms
from echelon.planner.search.ranked import RankedPlan, expected_of_request
from echelon.planner.search.search import SearchResult
from echelon.planner.view.document import DataTable
from echelon.planner.view.text_layout import WIDTH, data_text, fill_text, fit_page

HEADER = ("mesh", "zero", "schedule", "mb", "rec", "step s", "tok/s", "MFU", "GiB")
_COLUMNS = (
    "mb: sequences of a microbatch. rec: what runs forward again. tok/s: of a device. "
    "MFU: with full attention. GiB: of the fullest rank."
)
_CLOSED_FORM = "~"
"""What stands before seconds that are no events."""


def answer_text(
    answer: SearchResult, front: Sequence[RankedPlan] = (), *, columns: int = WIDTH
) -> str:
    """Return an answer as the page that a person reads; no line has more columns than there are."""
    parts = [
        "\n".join(_head(answer, columns=columns)),
        data_text(plans_table(answer.ranked), columns=columns),
        fill_text(f"{plans_legend(answer.ranked)} {_widest(answer.ranked)}", columns=columns),
    ]
    parts.append("\n".join(_best(answer, answer.first, columns=columns)))
    parts.append(
        "A step of the first takes, in seconds:\n\n"
        + data_text(seconds_terms(answer.first.estimate), columns=columns)
    )
    parts.append(
        "Its fullest rank holds:\n\n"
        + data_text(byte_terms(answer.first.estimate, answer.request.memory_bytes), columns=columns)
    )
    if answer.request.objective == "expected":
        expected = expected_of_request(answer.request, answer.first.estimate)
        parts.append("\n".join(expected_lines(expected, columns)))
    if front:
        text = "No other plan has less of step time, memory and devices than one of these:"
        parts.append(f"{text}\n\n{data_text(plans_table(front, devices=True), columns=columns)}")
    parts.append("\n".join(_seen(answer)))
    return fit_page("\n\n".join(parts), columns=columns) + "\n"


def plans_table(
    plans: Sequence[RankedPlan], *, devices: bool = False, memory_bytes: float | None = None
) -> DataTable:
    """Return plans as a table, one a row; with memory given, the last column says who fits."""
    head = ("devices", HEADER[0], *HEADER[2:]) if devices else HEADER
    rows = [_row(one, devices=devices) for one in plans]
    if memory_bytes is not None:
        head = (*head, "fits")
        fits = (fit_probability(one.estimate, memory_bytes) for one in plans)
        rows = [(*row, percent_of_fit(fit)) for row, fit in zip(rows, fits, strict=True)]
    return DataTable.of(head, rows)


def plans_legend(plans: Sequence[RankedPlan]) -> str:
    """Return what the heads and signs of a table of plans mean."""
    words = [word for plan in plans for cell in plan_cells(plan.candidate) for word in cell]
    texts = [_COLUMNS, *sign_texts(words)]
    if any(_is_closed_form(one) for one in plans):
        texts.append(f"{_CLOSED_FORM}: a closed form, no events.")
    return " ".join(texts)


def _is_closed_form(one: RankedPlan) -> bool:
    return one.candidate.mesh.pp > 1 and not one.simulated


def _row(one: RankedPlan, *, devices: bool) -> tuple[str, ...]:
    mesh, zero, *others = map(words_text, plan_cells(one.candidate))
    step, *numbers = plan_numbers(one.estimate)
    cells = (*others, _CLOSED_FORM * _is_closed_form(one) + step, *numbers)
    return (str(one.candidate.devices), mesh, *cells) if devices else (mesh, zero, *cells)


def _head(answer: SearchResult, *, columns: int) -> Iterator[str]:
    request = answer.request
    model, numbers, cluster = request.model, request.mathematics, request.cluster
    yield f"model     {model.name}: {parameters_text(model)}, {model.layers} blocks"
    yield f"cluster   {cluster.name}: {cluster.num_devices:,} x {cluster.device.name}"
    yield (
        f"batch     {numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens, "
        f"parameters in {numbers.precision.parameters}"
    )
    if request.defaults_taken:
        yield fill_text(
            f"assumed   {'; '.join(request.defaults_taken)}", rest=" " * 10, columns=columns
        )
    if request.pins.texts:
        text = "pinned    " + ", ".join(request.pins.texts.values())
        yield fill_text(text, rest=" " * 10, columns=columns)
    yield f"trainer   {request.trainer}"


def _best(answer: SearchResult, best: RankedPlan, *, columns: int) -> Iterator[str]:
    choice, estimate = best.candidate, best.estimate
    mesh = choice.mesh
    degrees = [f"{axis.value} {mesh.degree(axis)}" for axis in MESH_AXES if mesh.degree(axis) > 1]
    yield f"first     {choice.devices:,} ranks = {' x '.join(degrees) or '1'}"
    yield (
        f"          {choice.microbatches} microbatches of {choice.microbatch} on each data rank"
        + (", timed event by event" if best.simulated else ", by closed forms")
    )
    yield from rate_lines(estimate, columns=columns)
    if answer.request.price is not None:
        price = price_band(estimate, answer.request.price)
        devices = answer.request.cluster.num_devices
        yield f"price     {price_text(price, estimate.devices, devices)}"
    held = held_bytes_band(estimate)
    if answer.request.objective == "devices" and held.high > answer.request.memory_bytes:
        yield "warning   near the limit: at the end of the band of its memory it does not fit"
    if answer.offload:
        rate = decimal_bytes(answer.request.cluster.device.host_bandwidth)
        yield f"host      optimizer state rests there, over a link of {rate}/s"


def _widest(plans: Sequence[RankedPlan]) -> str:
    """Return how far the numbers of a table can be off, in the widest band of its rows."""
    parts: list[str] = []
    for name, of in (
        ("step", step_band),
        ("tok/s and MFU", tokens_per_s_band),
        ("GiB", held_bytes_band),
    ):
        bands = [of(one.estimate) for one in plans]
        low = min(band.low / band.value for band in bands) - 1.0
        high = max(band.high / band.value for band in bands) - 1.0
        parts.append(f"{name} {100 * low:+.0f} to {100 * high:+.0f} %")
    return f"Bands of these rows, at most: {', '.join(parts)}."


def _seen(answer: SearchResult) -> Iterator[str]:
    yield (
        f"{answer.num_legal:,} legal plans in {answer.seconds:.1f} s: {answer.num_computed:,} "
        "computed in full, the others"
    )
    yield "left out because they hold too much or cannot be among the best. Refused:"
    for rule, count in sorted(answer.refused.items(), key=lambda item: -item[1]):
        yield f"  {count:>13,}  {rule}"
