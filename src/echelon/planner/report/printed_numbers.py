# SPDX-License-Identifier: Apache-2.0
"""Every number of `echelon plan --json`, its class, and the arithmetic among them.

A path names a leaf: `stages[].held[].bytes`; `*` is any key of a mapping, `**` all below. The first
entry of `NUMBERS` that fits a path is its class. A leaf without a class fails a test.

Before a document is printed, or a page of it written, its sums and products are computed anew from
its other numbers (`require_agreement`): ProofFailed names each that differs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import isclose, prod
from typing import Any, cast

from echelon.core.errors import Problem, ProofFailed
from echelon.core.rulebook.planner import PLAN_NUMBERS_AGREE
from echelon.core.units import GIB, binary_bytes, binary_unit, decimal_bytes
from echelon.planner.view.document import PageDocument, Section


class Known(StrEnum):
    """Name a way to know that a printed number is right."""

    INPUT = "input"
    """It repeats the request, the plan, or a choice of the search."""
    REHEARSED = "rehearsed"
    """`echelon rehearse` compares it with a rank, under this name."""
    PROVED = "proved"
    """`echelon prove` compares it with recorded ranks, by this rule."""
    ARITHMETIC = "arithmetic"
    """It follows from other numbers of the document: `require_agreement`."""
    TESTED = "tested"
    """A test has arithmetic of its own."""
    ESTIMATE = "estimate"
    """It is an estimate, for this reason."""


@dataclass(frozen=True, slots=True)
class PrintedNumber:
    """The class of a leaf of a document."""

    path: str
    known: Known
    by: str

    def fits(self, path: str) -> bool:
        """True if the leaf at `path` is of this class."""
        return _pattern(self.path).fullmatch(path) is not None


@cache
def _pattern(path: str) -> re.Pattern[str]:
    words = {r"\*\*": ".*", r"\*": r"[^.\[\]]*"}
    text = re.escape(path)
    for word, pattern in words.items():
        text = text.replace(word, pattern)
    return re.compile(text)


_SECONDS = "seconds are a model, with bands of measured runs"

_ESTIMATE: tuple[tuple[str, Known, str], ...] = (
    ("step_s", Known.ARITHMETIC, "the sum of its terms"),
    ("seconds.*", Known.ESTIMATE, _SECONDS),
    ("held_bytes", Known.ARITHMETIC, "the sum of its terms"),
    ("reserved_bytes", Known.ARITHMETIC, "what is held without the context and NCCL"),
    ("allocated_bytes", Known.ARITHMETIC, "what is reserved without slack"),
    *(
        (f"bytes.{term}", Known.REHEARSED, name)
        for term, name in {
            "parameters": "parameters between steps",
            "gradients": "gradients between steps",
            "optimizer": "optimizer between steps",
            "gathered": "gathered parameters at the peak",
            "activations": "activations and messages at the peak",
            "messages": "activations and messages at the peak",
            "buffers": "buffers at the peak",
        }.items()
    ),
    ("bytes.*", Known.ESTIMATE, "memory of an allocator, a driver or NCCL"),
    ("*band*[]", Known.ARITHMETIC, "a band around its number"),
    ("*_bands.*[]", Known.ARITHMETIC, "a band around its number"),
    ("bands_rest_on.**", Known.INPUT, "measured runs near the plan"),
    ("tokens_per_s_per_device", Known.ARITHMETIC, "tokens / seconds / devices"),
    ("mfu", Known.TESTED, "tests/planner/report/test_printed_numbers.py::test_mfu_by_hand"),
    ("causal_mfu", Known.TESTED, "tests/planner/report/test_printed_numbers.py::test_mfu_by_hand"),
    ("mfu_counts", Known.INPUT, "the definition"),
)
"""Numbers of an estimate, of a run and of each plan of a search."""

_CHOICE: tuple[tuple[str, Known, str], ...] = (
    ("price_*", Known.ARITHMETIC, "seconds x devices x price / tokens"),
    *_ESTIMATE,
    ("devices", Known.ARITHMETIC, "the product of the mesh"),
    ("microbatches", Known.ARITHMETIC, "sequences / data ranks / sequences of a microbatch"),
    *(
        (name, Known.INPUT, "a choice of the search")
        for name in (
            *("mesh.*", "sequence_parallel", "context", "ulysses_degree", "expert_tp"),
            *("zero_stage", "optimizer_offload", "secondary_slices", "gather", "reduce"),
            *("schedule", "virtual_stages", "microbatch_sequences", "recompute_every"),
            *("recompute_operators[]", "timed", "stages[][]", "plan", "plan.**"),
        )
    ),
)

_BY_TESTS = "tests/planner/report/test_printed_numbers.py::"

_RUN: tuple[tuple[str, Known, str], ...] = (
    ("plan.**", Known.INPUT, "the plan itself"),
    ("hash", Known.INPUT, "the plan's hash"),
    ("assumed[]", Known.INPUT, "defaults in words"),
    ("num_parameters", Known.TESTED, f"{_BY_TESTS}test_parameters_are_those_of_the_model"),
    ("num_microbatches", Known.ARITHMETIC, "sequences / data ranks / sequences of a microbatch"),
    ("fits", Known.ARITHMETIC, "bytes against the memory of a device"),
    ("*_bytes_fit", Known.ARITHMETIC, "bytes against the memory of a device"),
    ("context", Known.INPUT, "no context ranks"),
    ("experts", Known.INPUT, "no experts"),
    ("context.positions_per_rank", Known.ARITHMETIC, "positions / context ranks"),
    ("context.imbalance", Known.ARITHMETIC, "least and most scores of a rank"),
    ("context.scores_by_rank[]", Known.TESTED, f"{_BY_TESTS}test_scores_are_pairs_of_the_mask"),
    ("context.*", Known.INPUT, "a choice of the plan"),
    ("experts.num_active_parameters", Known.TESTED, "tests/core/test_parameters.py"),
    ("experts.experts_per_rank", Known.ARITHMETIC, "experts / expert ranks"),
    ("experts.ranks_with_the_same_experts", Known.ARITHMETIC, "ranks of a stage / expert ranks"),
    ("experts.capacity", Known.TESTED, "tests/models/test_routing_capacity.py"),
    ("experts.*", Known.INPUT, "a choice of the plan"),
    ("stages[].pp_rank", Known.INPUT, "the place"),
    ("stages[].ranks[]", Known.ARITHMETIC, "each rank once"),
    ("stages[].stages[]", Known.ARITHMETIC, "each stage, on each of its ranks"),
    ("stages[].blocks[]", Known.ARITHMETIC, "the blocks of its stages"),
    ("*[].held[].bytes", Known.PROVED, "prove-bytes-held"),
    ("*[].held[].formula", Known.ARITHMETIC, "elements x bytes"),
    ("*[].held[].padding", Known.ARITHMETIC, "no more than the bytes"),
    ("stages[].held_bytes_by_pool.*", Known.ARITHMETIC, "the sum of its terms"),
    ("stages[].held_in_a_step_at_most[].bytes", Known.REHEARSED, "* in a step, at most"),
    ("*[].sent_bytes_per_step[].bytes", Known.ARITHMETIC, "times x each / steps"),
    ("*[].sent_bytes_per_step[].far", Known.REHEARSED, "sent over * to other nodes"),
    ("*[].sent_bytes_per_step[].count", Known.PROVED, "prove-bytes-sent"),
    ("*[].sent_bytes_per_step[].e*", Known.PROVED, "prove-bytes-sent"),
    ("stages[].sent_bytes_by_axis.*", Known.REHEARSED, "sent over *"),
    ("stages[].muon_bytes_by_rank.*", Known.PROVED, "prove-bytes-sent"),
    ("stages[].choices[].*_bytes", Known.TESTED, "tests/cost/bytes/test_held.py"),
    ("servers[].model_bytes_through_it_per_step", Known.TESTED, "tests/cost/bytes/test_servers.py"),
    *(
        (f"*[].{terms}[].{word}", Known.INPUT, "a name, a formula or a source in words")
        for terms, words in (
            ("held", ("name", "pool")),
            ("held_in_a_step_at_most", ("name", "pool", "formula", "padding")),
            ("sent_bytes_per_step", ("axis", "name", "formula", "source")),
        )
        for word in words
    ),
    *((f"stages[].choices[].{key}", Known.INPUT, "a setting") for key in ("setting", "value")),
    ("stages[].choices[].chosen", Known.INPUT, "a choice of the plan"),
    ("servers[].server", Known.INPUT, "the place"),
    ("servers[].rank", Known.INPUT, "the place"),
    *((f"estimate.{path}", known, by) for path, known, by in _ESTIMATE),
    ("pipeline.stages_of_rank[][]", Known.ARITHMETIC, "each stage, on each of its ranks"),
    ("pipeline.blocks[]", Known.ARITHMETIC, "all blocks of the model"),
    ("pipeline.*imbalance", Known.ESTIMATE, _SECONDS),
    ("pipeline.durations_s.*[]", Known.ESTIMATE, _SECONDS),
    ("pipeline.timing.makespan_s", Known.ESTIMATE, _SECONDS),
    ("pipeline.timing.bubble_fraction", Known.ESTIMATE, _SECONDS),
    ("pipeline.timing.bubble_fraction_with_transfers", Known.ARITHMETIC, "work over the makespan"),
    (
        "pipeline.timing.bubble_fraction_of_equal_stages",
        Known.TESTED,
        "tests/schedule/test_simulate.py::test_both_definitions_of_the_bubble",
    ),
    ("pipeline.timing.peak_in_flight_of_rank[]", Known.REHEARSED, "activations held at once"),
    ("pipeline.timing.num_messages", Known.REHEARSED, "messages of the schedule"),
    ("pipeline.*", Known.INPUT, "a choice of the plan"),
    ("notes[].**", Known.TESTED, "tests/planner/lint/test_checks.py"),
    ("groups.*[][]", Known.ARITHMETIC, "each rank once"),
)

_RECOMMENDED, _PLANS = "recommended", "search.plans[]"
_SEARCH: tuple[tuple[str, Known, str], ...] = (
    *(
        (f"search.{name}", Known.INPUT, "the request, or a count of the search")
        for name in (
            *("schema", "model", "cluster", "devices", "memory_bytes", "global_sequences"),
            *("sequence_length", "objective", "trainer", "price_per_device_hour", "pins.*"),
            *("assumed[]", "interrupted", "seen", "refused.*"),
        )
    ),
    ("search.num_*parameters", Known.TESTED, "tests/core/test_parameters.py"),
    ("search.seconds", Known.ESTIMATE, "the clock of this search"),
    ("search.computed", Known.ARITHMETIC, "no more than was seen"),
    *((f"{_PLANS}.{path}", known, by) for path, known, by in _CHOICE),
    ("recommended.*fits", Known.ESTIMATE, "a probability, by the bands of memory"),
    ("recommended.others[].fits", Known.ESTIMATE, "a probability, by the bands of memory"),
    ("recommended.others[].preferred_for[]", Known.INPUT, "names"),
    ("recommended.sure", Known.ESTIMATE, "a probability, by the bands of memory"),
    ("recommended.faster_share", Known.ESTIMATE, _SECONDS),
    ("recommended.noise", Known.ESTIMATE, _SECONDS),
    ("recommended.expected.*", Known.ESTIMATE, _SECONDS),
    ("recommended.longest_sequence.*", Known.ESTIMATE, "the longest that was looked at"),
    ("recommended.without_host.*", Known.ESTIMATE, _SECONDS),
    ("why.**", Known.ESTIMATE, "differences of two estimates"),
)

NUMBERS: tuple[PrintedNumber, ...] = tuple(
    PrintedNumber(*entry)
    for entry in (
        ("schema", Known.INPUT, "the version of the document"),
        ("command", Known.INPUT, "the command"),
        *_RUN,
        *_SEARCH,
    )
)
"""The class of each leaf, the first that fits."""


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path of each leaf of a JSON value, and the leaf; empty ones have none."""
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, object]", value).items():
            yield from leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for part in cast("list[object]", value):
            yield from leaves(part, f"{path}[]")
    else:
        yield path, value


def class_of(path: str) -> PrintedNumber | None:
    """Return the class of the leaf at a path; None where no entry fits.

    All plans of a search have the same leaves. Each of several sizes is a search.
    """
    if path.startswith("sizes[]."):
        path = path.removeprefix("sizes[].")
        path = path if path.startswith(_RECOMMENDED) else f"search.{path}"
    paths = [path]
    for place in ("search.front[]", f"{_RECOMMENDED}.others[].choice", _RECOMMENDED):
        if path.startswith(f"{place}."):
            paths.append(_PLANS + path.removeprefix(place))
    return next((one for same in paths for one in NUMBERS if one.fits(same)), None)


@dataclass(frozen=True, slots=True)
class Identity:
    """A printed number, and the same number from others of the document."""

    path: str
    printed: float
    computed: float
    by: str

    @property
    def holds(self) -> bool:
        """True if both are the same."""
        return isclose(self.printed, self.computed, rel_tol=1e-9, abs_tol=1e-12)

    def problem(self) -> Problem:
        """Return the difference as a problem."""
        return PLAN_NUMBERS_AGREE.problem(
            f"{self.path} is {self.printed:,.10g}; {self.by}: {self.computed:,.10g}"
        )


def require_agreement(document: Mapping[str, Any]) -> None:
    """Compute the sums and products of a document anew; ProofFailed names those that differ."""
    if "sizes" in document:
        for size in document["sizes"]:
            require_agreement({"search": size, _RECOMMENDED: size[_RECOMMENDED]})
        return
    require_identities(_of_run(document) if "plan" in document else _of_search(document))


def require_identities(identities: Iterable[Identity]) -> None:
    """Raise ProofFailed with each identity that does not hold."""
    if wrong := [identity.problem() for identity in identities if not identity.holds]:
        raise ProofFailed(wrong)


def _of_run(doc: Mapping[str, Any]) -> Iterator[Identity]:
    plan, rows = doc["plan"], doc["stages"]
    mesh, numbers, layout = plan["layout"]["mesh"], plan["mathematics"], plan["layout"]
    workers = prod(mesh[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    world = workers + mesh["servers"]
    length = numbers["sequence_length"]
    sequences = mesh["dp_replicate"] * mesh["dp_shard"] * layout["microbatch_sequences"]
    each = numbers["global_sequences"] / sequences
    yield Identity("num_microbatches", doc["num_microbatches"], each, "sequences / data ranks")
    tokens = numbers["global_sequences"] * length
    yield from _of_estimate("estimate", doc["estimate"], tokens, world)
    yield from _of_memory(doc)
    for row in rows:
        yield from _of_row(f"stages[{row['pp_rank']}]", row)
    for server in doc["servers"]:
        yield from _of_terms(f"servers[{server['server']}]", server)
    ranks = sum(len(row["ranks"]) for row in rows)
    yield Identity("stages[].ranks[]", ranks, workers, "ranks of the mesh")
    yield from _of_pipeline(doc)
    for axis, groups in doc["groups"].items():
        members = [rank for group in groups for rank in group]
        yield Identity(f"groups.{axis}", len(members), len({*members}), "different ranks")
    if (context := doc["context"]) is not None:
        positions, scores = length / mesh["cp"], context["scores_by_rank"]
        yield Identity(
            "context.positions_per_rank", context["positions_per_rank"], positions, "T / cp"
        )
        uneven = (max(scores) - min(scores)) / max(scores)
        yield Identity("context.imbalance", context["imbalance"], uneven, "(most - least) / most")
    if (experts := doc["experts"]) is not None:
        count = numbers["model"]["experts"]["num_experts"]
        own, same = experts["experts_per_rank"], experts["ranks_with_the_same_experts"]
        yield Identity("experts.experts_per_rank", own, count // experts["ep"], "experts / ep")
        copies = workers // (mesh["pp"] * experts["ep"] * experts["expert_tp"])
        yield Identity("experts.ranks_with_the_same_experts", same, copies, "ranks / (ep x pieces)")


def _of_memory(doc: Mapping[str, Any]) -> Iterator[Identity]:
    """Yield the three statements about memory, from the bytes that the document prints."""
    cluster = doc["plan"]["cluster"]
    room, shares = cluster["device"]["memory_bytes"], cluster["backend"] == "gloo"
    pools = {"device", "host"} if shares else {"device"}

    def most(*keys: str) -> int:
        return max(
            sum(term["bytes"] for key in keys for term in row[key] if term["pool"] in pools)
            for row in doc["stages"]
        )

    held, step = most("held"), most("held", "held_in_a_step_at_most")
    yield Identity("held_bytes_fit", doc["held_bytes_fit"], held <= room, "held <= memory")
    yield Identity("step_bytes_fit", doc["step_bytes_fit"], step <= room, "in a step <= memory")
    if held > room or doc["estimate"]["held_bytes"] <= room:
        yield Identity("fits", doc["fits"], held <= room, "bytes <= memory")


def _of_row(at: str, row: Mapping[str, Any]) -> Iterator[Identity]:
    yield from _of_terms(at, row)
    for pool, size in row["held_bytes_by_pool"].items():
        total = sum(term["bytes"] for term in row["held"] if term["pool"] == pool)
        yield Identity(f"{at}.held_bytes_by_pool.{pool}", size, total, "the sum of its terms")
    for axis, size in row["sent_bytes_by_axis"].items():
        total = sum(term["bytes"] for term in row["sent_bytes_per_step"] if term["axis"] == axis)
        yield Identity(f"{at}.sent_bytes_by_axis.{axis}", size, total, "the sum of its terms")


def _of_terms(at: str, row: Mapping[str, Any]) -> Iterator[Identity]:
    """Yield each term of what is held and sent, from its own factors."""
    for term in row["held"]:
        name, size = f"{at}.held.{term['name']}", term["bytes"]
        if factors := re.fullmatch(r"([\d,]+) x (\d+)", term["formula"]):
            elements, each = (int(factor.replace(",", "")) for factor in factors.groups())
            yield Identity(name, size, elements * each, term["formula"])
        padding = term["padding"]
        yield Identity(f"{name}.padding", padding, min(padding, size), "no more than the bytes")
    for term in row["sent_bytes_per_step"]:
        name, size = f"{at}.sent.{term['name']}", term["bytes"]
        sent = term["count"] * term["each"] // term["every"]
        yield Identity(name, size, sent, f"{term['count']} x {term['each']:,} / {term['every']}")
        if (far := term["far"]) is not None:
            yield Identity(f"{name}.far", far, min(far, term["each"]), "no more than is sent")


def _of_pipeline(doc: Mapping[str, Any]) -> Iterator[Identity]:
    pipeline, model = doc["pipeline"], doc["plan"]["mathematics"]["model"]
    blocks = sum(pipeline["blocks"])
    yield Identity("pipeline.blocks", blocks, model["layers"], "blocks of the model")
    held, rows = pipeline["stages_of_rank"], doc["stages"]
    for place, (stages, row) in enumerate(zip(held, rows, strict=True)):
        own = sum(pipeline["blocks"][stage] for stage in stages)
        at = f"stages[{place}]"
        yield Identity(f"{at}.blocks", len(row["blocks"]), own, "blocks of its stages")
        same = row["stages"] == stages
        yield Identity(f"{at}.stages", same, True, "pipeline.stages_of_rank")
    if (timing := pipeline["timing"]) is not None:
        lengths = pipeline["durations_s"]
        work = doc["num_microbatches"] * sum(sum(lengths[kind]) for kind in "FBW")
        idle = 1.0 - work / (len(held) * timing["makespan_s"]) if work else 0.0
        name = "pipeline.timing.bubble_fraction_with_transfers"
        by = "1 - work / (ranks x makespan)"
        yield Identity(name, timing["bubble_fraction_with_transfers"], idle, by)


def _of_estimate(
    at: str, one: Mapping[str, Any], tokens: float, devices: int
) -> Iterator[Identity]:
    terms, step = one["bytes"], one["step_s"]
    yield Identity(f"{at}.step_s", step, sum(one["seconds"].values()), "the sum of its terms")
    yield Identity(f"{at}.held_bytes", one["held_bytes"], sum(terms.values()), "the sum of terms")
    reserved = one["held_bytes"] - terms.get("context", 0.0) - terms.get("nccl", 0.0)
    yield Identity(f"{at}.reserved_bytes", one["reserved_bytes"], reserved, "held - driver")
    allocated = one["reserved_bytes"] - terms.get("slack", 0.0)
    yield Identity(f"{at}.allocated_bytes", one["allocated_bytes"], allocated, "reserved - slack")
    rate = one["tokens_per_s_per_device"]
    by = "tokens / seconds / devices"
    yield Identity(f"{at}.tokens_per_s_per_device", rate, tokens / step / devices, by)
    bands = [("step_band_s", step, one["step_band_s"])]
    bands.append(("held_band_bytes", one["held_bytes"], one["held_band_bytes"]))
    for values, key in (("seconds", "seconds_bands"), ("bytes", "bytes_bands")):
        bands += [
            (f"{key}.{name}", one[values].get(name, 0.0), band) for name, band in one[key].items()
        ]
    for name, value, (low, high) in bands:
        yield Identity(f"{at}.{name}", value, min(max(value, low), high), "inside of its band")
    for rate_name, key in (("tokens_per_s_per_device", "tokens_band"), ("mfu", "mfu_band")):
        # The longest step is the lowest rate.
        for end, other in ((0, 1), (1, 0)):
            wanted = one[rate_name] * step / one["step_band_s"][other]
            yield Identity(f"{at}.{key}[{end}]", one[key][end], wanted, "as the step's band")


def _of_search(doc: Mapping[str, Any]) -> Iterator[Identity]:
    search = doc["search"]
    tokens = search["global_sequences"] * search["sequence_length"]
    computed = min(search["computed"], search["seen"])
    yield Identity("search.computed", search["computed"], computed, "no more than was seen")
    choices = [
        (f"search.{key}[{n}]", one)
        for key in ("plans", "front")
        for n, one in enumerate(search[key])
    ]
    if (first := doc.get(_RECOMMENDED)) is not None:
        choices.append((_RECOMMENDED, first))
        choices += [
            (f"{_RECOMMENDED}.others[{n}]", one["choice"]) for n, one in enumerate(first["others"])
        ]
    for at, choice in choices:
        mesh, devices = choice["mesh"], choice["devices"]
        ranks = prod(mesh[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        yield Identity(f"{at}.devices", devices, ranks + mesh["servers"], "ranks of the mesh")
        data = mesh["dp_replicate"] * mesh["dp_shard"] * choice["microbatch_sequences"]
        each = search["global_sequences"] / data
        yield Identity(f"{at}.microbatches", choice["microbatches"], each, "sequences / data ranks")
        yield from _of_estimate(at, choice, tokens, devices)
        yield from _of_price(at, choice, search, tokens)


def _of_price(
    at: str, choice: Mapping[str, Any], search: Mapping[str, Any], tokens: float
) -> Iterator[Identity]:
    """Yield prices: seconds x devices x price of a device, for a million tokens."""
    if search["price_per_device_hour"] is None:
        return
    second = search["price_per_device_hour"] / 3600.0
    for key, devices in (
        ("price_of_a_million_tokens", choice["devices"]),
        ("price_with_idle_devices", search["devices"]),
    ):
        price = 1e6 * choice["step_s"] * devices * second / tokens
        yield Identity(f"{at}.{key}", choice[key], price, "seconds x devices x price / tokens")
    for end in (0, 1):
        ratio = choice["step_band_s"][end] / choice["step_s"]
        wanted = choice["price_of_a_million_tokens"] * ratio
        yield Identity(
            f"{at}.price_band[{end}]", choice["price_band"][end], wanted, "as the step's"
        )


def require_page(page: PageDocument, document: Mapping[str, Any]) -> None:
    """Look for the numbers of a document on its page; ProofFailed names those that it lacks.

    `document` is of a run, or of a search, of which the page has the first plan.
    """
    places: dict[str, Collection[str]] = {section.id: _cells(section) for section in page.sections}
    places |= {f"{section.id}{SENTENCE}": section.summary for section in page.sections}
    places |= {FACTS: {fact.value for fact in page.facts}, VERDICT: page.verdict}
    wrong = [
        PLAN_NUMBERS_AGREE.problem(f"{path} is {text}, and the page does not have it in {place}")
        for path, place, text in _shown(document)
        if text not in places.get(place, ())
    ]
    if wrong:
        raise ProofFailed(wrong)


FACTS, VERDICT, SENTENCE = "its facts", "its verdict", ", in its sentence"


def _cells(section: Section) -> set[str]:
    rows = () if section.table is None else section.table.rows
    return {str(cell) for row in rows for cell in row}


def _shown(doc: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield numbers of a document, where a page has them, and as which text."""
    run = "plan" in doc
    at, one = ("estimate", doc["estimate"]) if run else first_of_search(doc)
    yield f"{at}.step_s", FACTS, f"{one['step_s']:.4g} s"
    yield f"{at}.step_s", VERDICT, f"a step takes {one['step_s']:.4g} s"
    yield f"{at}.tokens_per_s_per_device", FACTS, f"{one['tokens_per_s_per_device']:,.0f}"
    yield f"{at}.mfu", FACTS, f"{100 * one['mfu']:.1f} %"
    yield f"{at}.held_bytes", FACTS, binary_bytes(one["held_bytes"])
    size, _ = binary_unit(min(one["held_bytes"], GIB))
    for name, value in one["bytes"].items():
        if value > 0:
            yield f"{at}.bytes.{name}", "memory-terms", f"{value / size:.4g}"
    for name, value in one["seconds"].items():
        if value > 0:
            yield f"{at}.seconds.{name}", "step", f"{value:.4g}"
    timing = doc["pipeline"]["timing"] if run else None
    if timing is not None and doc["plan"]["layout"]["mesh"]["pp"] > 1:
        seconds, idle = timing["makespan_s"], timing["bubble_fraction_with_transfers"]
        place, name = f"schedule{SENTENCE}", "pipeline.timing"
        yield f"{name}.makespan_s", place, f"{seconds:.4g} s from the first action to the last"
        yield f"{name}.bubble_fraction_with_transfers", place, f"idle for {100 * idle:.1f} %"
    for row in doc["stages"] if run else ():
        place = f"stages[{row['pp_rank']}]"
        for term in row["held"]:
            yield f"{place}.held.{term['name']}", "held", binary_bytes(term["bytes"])
        for term in row["held_in_a_step_at_most"]:
            name = f"{place}.held_in_a_step_at_most.{term['name']}"
            yield name, "step-bytes", binary_bytes(term["bytes"])
        for axis, sent in row["sent_bytes_by_axis"].items():
            yield f"{place}.sent_bytes_by_axis.{axis}", "sent", f"{sent:,}"
        for term in row["sent_bytes_per_step"] if row["sent_bytes_by_axis"] else ():
            yield f"{place}.sent.{term['name']}", "messages", decimal_bytes(term["bytes"])


def first_of_search(doc: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the path of the first plan of a search's document, and the plan."""
    if (found := doc.get(_RECOMMENDED)) is not None:
        return _RECOMMENDED, found
    return "search.plans[0]", doc["search"]["plans"][0]
