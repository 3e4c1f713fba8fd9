"""What `echelon plan --cluster` prints: the best plans, what the first takes, what was seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill

from echelon.cli.output import WIDTH, fit_page, table
from echelon.cli.plan.estimate import bytes_table, rate_lines, seconds_table
from echelon.cli.plan.expected_text import expected_lines
from echelon.core.axis import MESH_AXES
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.parameters import num_parameters
from echelon.core.units import short_count
from echelon.planner.explain.bands import held_bytes_band, price_band, step_band, tokens_per_s_band
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.ranked import RankedPlan, expected_of_request
from echelon.planner.search.search import SearchResult
from echelon.schedule.build import SCHEDULES

HEADER = ("mesh", "zero", "schedule", "mb", "rec", "step s", "tok/s", "MFU", "GB")
LEGEND = (
    "mb: sequences of a microbatch. rec: blocks that run forward again. tok/s: of a device. "
    "GB: of the fullest rank. 1f1b x4: interleaved, four stages on a rank. tp8s: with sequence "
    "parallelism. cp4u2: two of four context ranks exchange heads. ~: a closed form, no events."
)


def answer_text(answer: SearchResult, front: Sequence[RankedPlan] = ()) -> str:
    """Return an answer as the page that a person reads; every line has 80 columns at most."""
    parts = [
        "\n".join(_head(answer)),
        plans_table(answer.ranked),
        fill(f"{LEGEND}{hybrid_legend(answer.ranked)} {_widest(answer.ranked)}", WIDTH),
    ]
    parts.append("\n".join(_best(answer, answer.first)))
    parts.append(
        "A step of the first takes, in seconds:\n\n" + seconds_table(answer.first.estimate)
    )
    parts.append(
        "Its fullest rank holds, in GB:\n\n"
        + bytes_table(answer.first.estimate, answer.request.memory_bytes)
    )
    if answer.request.objective == "expected":
        expected = expected_of_request(answer.request, answer.first.estimate)
        parts.append("\n".join(expected_lines(expected)))
    if front:
        text = "No other plan has less of step time, memory and devices than one of these:"
        parts.append(f"{text}\n\n{plans_table(front, devices=True)}")
    parts.append("\n".join(_seen(answer)))
    return fit_page("\n\n".join(parts)) + "\n"


def plans_table(plans: Sequence[RankedPlan], *, devices: bool = False) -> str:
    """Return plans as a table, one a line."""
    rows = [_row(one, devices=devices) for one in plans]
    header = ("devices", *HEADER[:1], *HEADER[2:]) if devices else HEADER
    return table(header, rows, WIDTH)


def mesh_text(choice: CandidatePlan) -> str:
    """Return the degrees of a mesh that are not 1, such as ``pp16 dp2x32 tp8s``."""
    mesh = choice.mesh
    record = CONTEXT_KINDS[choice.context]
    context = record.symbol + str(choice.ulysses) * (record.exchange == "inner")
    words = [f"pp{mesh.pp}"] if mesh.pp > 1 else []
    words += [f"dp{mesh.dp_text}"] if mesh.dp > 1 else []
    if mesh.cp > 1:
        words.append(f"cp{mesh.cp}{context}")
    if mesh.tp > 1:
        words.append(f"tp{mesh.tp}{'s' * choice.sequence_parallel}")
    if mesh.ep > 1:
        words.append(f"ep{mesh.ep}{'t' * (choice.expert_tp > 1)}")
    return " ".join(words) or "one rank"


def hybrid_legend(plans: Sequence[RankedPlan]) -> str:
    """Return what a mesh such as ``dp2x4`` says, where one of the plans has it."""
    meshes = (one.candidate.mesh for one in plans)
    hybrid = next((mesh for mesh in meshes if len(mesh.data_degrees) > 1), None)
    if hybrid is None:
        return ""
    replicas, shards = hybrid.data_degrees.values()
    return f" dp{hybrid.dp_text}: {replicas} replicas of {shards} shards."


def schedule_text(choice: CandidatePlan) -> str:
    """Return the schedule of a plan in ten columns; "-" without a pipeline."""
    if choice.mesh.pp == 1:
        return "-"
    short = SCHEDULES[choice.schedule].short_name
    return f"{short} x{choice.virtual}" if short else choice.schedule


def recompute_text(choice: CandidatePlan) -> str:
    """Return which blocks run forward again: "-", "all" or one of so many."""
    if choice.recompute == 0:
        return "-"
    return "all" if choice.recompute == 1 else f"1/{choice.recompute}"


def _row(one: RankedPlan, *, devices: bool) -> tuple[str, ...]:
    choice, estimate = one.candidate, one.estimate
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


def _head(answer: SearchResult) -> Iterator[str]:
    request = answer.request
    model, numbers, cluster = request.model, request.mathematics, request.cluster
    count = short_count(num_parameters(model))
    yield f"model     {model.name}: {count} parameters, {model.layers} blocks"
    yield f"cluster   {cluster.name}: {cluster.num_devices:,} x {cluster.device.name}"
    yield (
        f"batch     {numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens, "
        f"parameters in {numbers.precision.parameters}"
    )
    if request.defaults_taken:
        yield fill(
            f"assumed   {'; '.join(request.defaults_taken)}", WIDTH, subsequent_indent=" " * 10
        )
    if request.pins.texts:
        text = "pinned    " + ", ".join(request.pins.texts.values())
        yield fill(text, WIDTH, subsequent_indent=" " * 10)
    yield f"trainer   {request.trainer}"


def _best(answer: SearchResult, best: RankedPlan) -> Iterator[str]:
    choice, estimate = best.candidate, best.estimate
    mesh = choice.mesh
    degrees = [f"{axis.value} {mesh.degree(axis)}" for axis in MESH_AXES if mesh.degree(axis) > 1]
    yield f"first     {choice.devices:,} ranks = {' x '.join(degrees) or '1'}"
    yield (
        f"          {choice.microbatches} microbatches of {choice.microbatch} on each data rank"
        + (", timed event by event" if best.simulated else ", by closed forms")
    )
    yield from rate_lines(estimate)
    if answer.request.price is not None:
        price = price_band(estimate, answer.request.price)
        yield (
            f"price     {price.value:.4g} ({price.low:.4g} to {price.high:.4g}) "
            "for a million tokens"
        )
    held = held_bytes_band(estimate)
    if answer.request.objective == "devices" and held.high > answer.request.memory_bytes:
        yield "warning   near the limit: at the end of the band of its memory it does not fit"
    if answer.offload:
        yield "host      optimizer state rests there: nothing fits else, or slower; PCIe 4.0 taken"


def _widest(plans: Sequence[RankedPlan]) -> str:
    """Return how far the numbers of a table can be off, in the widest band of its rows."""
    parts: list[str] = []
    for name, of in (
        ("step", step_band),
        ("tok/s and MFU", tokens_per_s_band),
        ("GB", held_bytes_band),
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
