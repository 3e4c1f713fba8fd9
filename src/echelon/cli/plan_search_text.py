"""What `echelon plan --cluster` prints: the best plans, what the first takes, what was seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from echelon.cli.output import table
from echelon.cli.wrapped import WIDTH, fitted
from echelon.core.axis import MESH_AXES
from echelon.core.parameters import num_parameters
from echelon.core.units import short_count
from echelon.planner.explain.bands import (
    Banded,
    bytes_of,
    held_of,
    mfu_of,
    price_of,
    step_of,
    terms_of,
    tokens_of,
)
from echelon.planner.explain.grounds import grounds_of

if TYPE_CHECKING:
    from echelon.planner.choice import Choice
    from echelon.planner.ranked import Ranked
    from echelon.planner.search import Answer

SMALLEST_SHARE = 0.0005
HEADER = ("mesh", "zero", "schedule", "mb", "rec", "step s", "tok/s", "MFU", "GB")
LEGEND = (
    "mb: sequences of a microbatch. rec: blocks that run forward again. tok/s: of a device. "
    "GB: of the fullest rank. 1f1b x4: interleaved, four stages on a rank. tp8s: with sequence "
    "parallelism. cp4u2: two of four context ranks exchange heads. ~: a closed form, no events."
)


def answer_text(answer: Answer, front: Sequence[Ranked] = ()) -> str:
    """Return an answer as the page that a person reads; every line has 80 columns at most."""
    assert answer.best is not None
    parts = [
        "\n".join(_head(answer)),
        plans_table(answer.ranked),
        fill(f"{LEGEND} {_widest(answer.ranked)}", WIDTH),
    ]
    parts.append("\n".join(_best(answer, answer.best)))
    parts.append("A step of the first takes, in seconds:\n\n" + _seconds(answer.best))
    parts.append("Its fullest rank holds, in GB:\n\n" + _bytes(answer, answer.best))
    if front:
        text = "No other plan has less of step time, memory and devices than one of these:"
        parts.append(f"{text}\n\n{plans_table(front, devices=True)}")
    parts.append("\n".join(_seen(answer)))
    return fitted("\n\n".join(parts)) + "\n"


def plans_table(plans: Sequence[Ranked], *, devices: bool = False) -> str:
    """Return plans as a table, one a line."""
    rows = [_row(one, devices=devices) for one in plans]
    header = ("devices", *HEADER[:1], *HEADER[2:]) if devices else HEADER
    return table(header, rows, WIDTH)


def mesh_text(choice: Choice) -> str:
    """Return the degrees of a mesh that are not 1, such as ``pp16 dp64 tp8s``."""
    mesh = choice.mesh
    context = {"ulysses": "u", "gathered": "g", "striped": "s"}.get(choice.context, "")
    if choice.context == "ulysses-ring":
        context = f"u{choice.ulysses}"
    words = [f"{name}{degree}" for name, degree in (("pp", mesh.pp), ("dp", mesh.dp)) if degree > 1]
    if mesh.cp > 1:
        words.append(f"cp{mesh.cp}{context}")
    if mesh.tp > 1:
        words.append(f"tp{mesh.tp}{'s' * choice.sequence_parallel}")
    if mesh.ep > 1:
        words.append(f"ep{mesh.ep}{'t' * (choice.expert_tp > 1)}")
    return " ".join(words) or "one rank"


def schedule_text(choice: Choice) -> str:
    """Return the schedule of a plan in ten columns; "-" without a pipeline."""
    if choice.mesh.pp == 1:
        return "-"
    if choice.schedule == "interleaved-1f1b":
        return f"1f1b x{choice.virtual}"
    if choice.schedule == "breadth-first":
        return f"breadth x{choice.virtual}"
    return choice.schedule


def recompute_text(choice: Choice) -> str:
    """Return which blocks run forward again: "-", "all" or one of so many."""
    if choice.recompute == 0:
        return "-"
    return "all" if choice.recompute == 1 else f"1/{choice.recompute}"


def _row(one: Ranked, *, devices: bool) -> tuple[str, ...]:
    choice, estimate = one.choice, one.estimate
    zero = str(choice.zero) + ("+h" if choice.offload else "")
    step = "~" * (choice.mesh.pp > 1 and not one.simulated) + f"{estimate.step_s:.4g}"
    cells = (
        schedule_text(choice),
        str(choice.microbatch),
        recompute_text(choice),
        step,
        f"{estimate.tokens_per_s_per_device:.0f}",
        f"{100 * estimate.mfu:.1f}",
        f"{estimate.bytes_held / 1e9:.1f}",
    )
    if devices:
        return str(choice.devices), mesh_text(choice), *cells
    return mesh_text(choice), zero, *cells


def _head(answer: Answer) -> Iterator[str]:
    request = answer.request
    model, numbers, cluster = request.model, request.mathematics, request.cluster
    count = short_count(num_parameters(model))
    yield f"model     {model.name}: {count} parameters, {model.layers} blocks"
    yield f"cluster   {cluster.name}: {cluster.num_devices:,} x {cluster.device.name}"
    yield (
        f"batch     {numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens, "
        f"parameters in {numbers.precision.parameters}"
    )
    if request.told:
        yield fill(f"assumed   {'; '.join(request.told)}", WIDTH, subsequent_indent=" " * 10)
    if request.pins.texts:
        text = "pinned    " + ", ".join(request.pins.texts.values())
        yield fill(text, WIDTH, subsequent_indent=" " * 10)
    yield f"trainer   {request.trainer}"


def _best(answer: Answer, best: Ranked) -> Iterator[str]:
    choice, estimate = best.choice, best.estimate
    mesh = choice.mesh
    degrees = [f"{axis.value} {mesh.degree(axis)}" for axis in MESH_AXES if mesh.degree(axis) > 1]
    step, held, rests = step_of(estimate), held_of(estimate), grounds_of(estimate.work)
    yield f"first     {choice.devices:,} ranks = {' x '.join(degrees) or '1'}"
    yield (
        f"          {choice.microbatches} microbatches of {choice.microbatch} on each data rank"
        + (", timed event by event" if best.simulated else ", by closed forms")
    )
    tokens, mfu = tokens_of(estimate), mfu_of(estimate)
    yield f"step      {step.value:.4g} s ({step.low:.4g} to {step.high:.4g})"
    yield (
        f"rate      {tokens.value:.0f} tokens/s of a device "
        f"({tokens.low:.0f} to {tokens.high:.0f}), "
        f"MFU {100 * mfu.value:.1f} ({100 * mfu.low:.1f} to {100 * mfu.high:.1f})"
    )
    yield f"memory    {_gb(held.value)} GB ({_gb(held.low)} to {_gb(held.high)})"
    if answer.request.price is not None:
        price = price_of(estimate, answer.request.price)
        yield (
            f"price     {price.value:.4g} ({price.low:.4g} to {price.high:.4g}) "
            "for a million tokens"
        )
    told = f"four of five measured runs lie inside: {rests.like}"
    if rests.beyond:
        told += f"; wider for what no run tells: {', '.join(rests.beyond)}"
    exact = "Bytes of parameters, gradients and optimizer are counted: they have no band"
    yield fill(f"bands     {told}. {exact}.", WIDTH, subsequent_indent=" " * 10)
    if answer.request.objective == "devices" and held.high > answer.request.memory_bytes:
        yield "warning   near the limit: at the end of the band of its memory it does not fit"
    if answer.offload:
        yield "host      optimizer state rests there: nothing fits else; over PCIe 4.0, assumed"


def _widest(plans: Sequence[Ranked]) -> str:
    """Return how far the numbers of a table can be off, in the widest band of its rows."""
    parts: list[str] = []
    for name, of in (("step", step_of), ("tok/s and MFU", tokens_of), ("GB", held_of)):
        bands = [of(one.estimate) for one in plans]
        low = min(band.low / band.value for band in bands) - 1.0
        high = max(band.high / band.value for band in bands) - 1.0
        parts.append(f"{name} {100 * low:+.0f} to {100 * high:+.0f} %")
    return f"Bands of these rows, at most: {', '.join(parts)}."


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"


def _seconds(best: Ranked) -> str:
    terms = {term.name: term.amount for term in terms_of(best.estimate)}
    header = ("term", "seconds", "band", "of the step")
    return _terms(terms, step_of(best.estimate), best.estimate.step_s, header)


def _bytes(answer: Answer, best: Ranked) -> str:
    terms = {term.name: _in_gb(term.amount) for term in bytes_of(best.estimate)}
    header = ("term", "GB", "band", "of the memory")
    whole = answer.request.memory_bytes / 1e9
    return _terms(terms, _in_gb(held_of(best.estimate)), whole, header)


def _in_gb(amount: Banded) -> Banded:
    return Banded(value=amount.value / 1e9, low=amount.low / 1e9, high=amount.high / 1e9)


def _terms(
    terms: Mapping[str, Banded], total: Banded, whole: float, header: tuple[str, ...]
) -> str:
    """Return terms as a table, the largest first; "-" is the band of what is counted."""
    large = {key: one for key, one in terms.items() if one.value > SMALLEST_SHARE * whole}
    shown = sorted(large.items(), key=lambda item: -item[1].value)
    small = [one for key, one in terms.items() if key not in large]
    rest = Banded(
        value=sum(one.value for one in small),
        low=sum(one.low for one in small),
        high=sum(one.high for one in small),
    )
    shown += [("all others", rest)] if rest.value > 0 else []
    shown.append((f"sum ({header[-1].removeprefix('of the ')})", total))
    rows = [
        (key, f"{one.value:.4g}", _band(one), f"{100 * one.value / whole:.1f} %")
        for key, one in shown
    ]
    return table(header, rows, WIDTH)


def _band(amount: Banded) -> str:
    return "-" if amount.low == amount.high else f"{amount.low:.4g} to {amount.high:.4g}"


def _seen(answer: Answer) -> Iterator[str]:
    yield (
        f"{answer.seen:,} legal plans in {answer.seconds:.1f} s: {answer.computed:,} computed in "
        "full, the others"
    )
    yield "left out because they hold too much or cannot be among the best. Refused:"
    for rule, count in sorted(answer.refused.items(), key=lambda item: -item[1]):
        yield f"  {count:>13,}  {rule}"
