# SPDX-License-Identifier: Apache-2.0
"""The arithmetic among numbers of `echelon plan --json`, and those numbers on a page.

Before a document is printed, or its page written, sums, rates and prices are computed from its
other numbers (`require_agreement`), and its numbers are looked for on the page (`require_page`).
ProofFailed names each that differs. Tests have the class of every number of the document.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose, prod
from typing import Any

from echelon.core.errors import Problem, ProofFailed
from echelon.core.rulebook.planner import PLAN_NUMBERS_AGREE
from echelon.core.units import GIB, binary_bytes, binary_unit, decimal_bytes
from echelon.planner.view.document import PageDocument, Section

_RECOMMENDED = "recommended"
_SUM = "the sum of its terms"


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
    """Compute sums, rates and prices of a document; ProofFailed names each that differs."""
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
    numbers, layout = plan["mathematics"], plan["layout"]
    mesh, length = layout["mesh"], numbers["sequence_length"]
    workers = _workers(mesh)
    each = numbers["global_sequences"] / _sequences_at_once(mesh, layout)
    yield Identity("num_microbatches", doc["num_microbatches"], each, "sequences / data ranks")
    tokens = numbers["global_sequences"] * length
    yield from _of_estimate("estimate", doc["estimate"], tokens, workers + mesh["servers"])
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
        own, scores = context["positions_per_rank"], context["scores_by_rank"]
        yield Identity("context.positions_per_rank", own, length / mesh["cp"], "T / cp")
        uneven = (max(scores) - min(scores)) / max(scores)
        yield Identity("context.imbalance", context["imbalance"], uneven, "(most - least) / most")
    if (experts := doc["experts"]) is not None:
        count = numbers["model"]["experts"]["num_experts"]
        own, same = experts["experts_per_rank"], experts["ranks_with_the_same_experts"]
        yield Identity("experts.experts_per_rank", own, count // experts["ep"], "experts / ep")
        copies = workers // (mesh["pp"] * experts["ep"] * experts["expert_tp"])
        yield Identity("experts.ranks_with_the_same_experts", same, copies, "ranks / (ep x pieces)")


def _workers(mesh: Mapping[str, int]) -> int:
    """Number of ranks that are no servers."""
    return prod(mesh[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))


def _sequences_at_once(mesh: Mapping[str, int], layout: Mapping[str, Any]) -> int:
    """Number of sequences in one microbatch of all data ranks."""
    return mesh["dp_replicate"] * mesh["dp_shard"] * layout["microbatch_sequences"]


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
    for sums, terms, key in (
        ("held_bytes_by_pool", "held", "pool"),
        ("sent_bytes_by_axis", "sent_bytes_per_step", "axis"),
    ):
        for name, size in row[sums].items():
            total = sum(term["bytes"] for term in row[terms] if term[key] == name)
            yield Identity(f"{at}.{sums}.{name}", size, total, _SUM)
    for choice in [choice for choice in row["choices"] if choice["chosen"]]:
        for key, terms in (("held_bytes", "held"), ("step_bytes", "held_in_a_step_at_most")):
            total = sum(term["bytes"] for term in row[terms] if term["pool"] == "device")
            yield Identity(f"{at}.choices.{choice['setting']}.{key}", choice[key], total, _SUM)


def _of_terms(at: str, row: Mapping[str, Any]) -> Iterator[Identity]:
    """Yield each term of the bytes held and sent, from its own factors."""
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
    blocks, stages_of_rank = pipeline["blocks"], pipeline["stages_of_rank"]
    yield Identity("pipeline.blocks", sum(blocks), model["layers"], "blocks of the model")
    for place, (stages, row) in enumerate(zip(stages_of_rank, doc["stages"], strict=True)):
        at, own = f"stages[{place}]", sum(blocks[stage] for stage in stages)
        yield Identity(f"{at}.blocks", len(row["blocks"]), own, "blocks of its stages")
        same = row["stages"] == stages
        yield Identity(f"{at}.stages", same, True, "pipeline.stages_of_rank")
    if (timing := pipeline["timing"]) is not None:
        lengths = pipeline["durations_s"]
        work = doc["num_microbatches"] * sum(sum(lengths[kind]) for kind in "FBW")
        idle = 1.0 - work / (len(stages_of_rank) * timing["makespan_s"]) if work else 0.0
        name = "bubble_fraction_with_transfers"
        by = "1 - work / (ranks x makespan)"
        yield Identity(f"pipeline.timing.{name}", timing[name], idle, by)


def _of_estimate(
    at: str, estimate: Mapping[str, Any], tokens: float, devices: int
) -> Iterator[Identity]:
    terms, seconds, step = estimate["bytes"], estimate["seconds"], estimate["step_s"]
    held, reserved = estimate["held_bytes"], estimate["reserved_bytes"]
    driver = terms.get("context", 0.0) + terms.get("nccl", 0.0)
    rate = tokens / step / devices
    for key, computed, by in (
        ("step_s", sum(seconds.values()), _SUM),
        ("held_bytes", sum(terms.values()), _SUM),
        ("reserved_bytes", held - driver, "held - driver"),
        ("allocated_bytes", reserved - terms.get("slack", 0.0), "reserved - slack"),
        ("tokens_per_s_per_device", rate, "tokens / seconds / devices"),
    ):
        yield Identity(f"{at}.{key}", estimate[key], computed, by)
    bands = [("step_band_s", step, estimate["step_band_s"])]
    bands.append(("held_band_bytes", held, estimate["held_band_bytes"]))
    for values, key in ((seconds, "seconds_bands"), (terms, "bytes_bands")):
        bands += [
            (f"{key}.{name}", values.get(name, 0.0), band) for name, band in estimate[key].items()
        ]
    for name, value, (low, high) in bands:
        yield Identity(f"{at}.{name}", value, min(max(value, low), high), "inside of its band")
    for rate_name, key in (("tokens_per_s_per_device", "tokens_band"), ("mfu", "mfu_band")):
        # The longest step is the lowest rate.
        for end, other in ((0, 1), (1, 0)):
            wanted = estimate[rate_name] * step / estimate["step_band_s"][other]
            yield Identity(f"{at}.{key}[{end}]", estimate[key][end], wanted, "as the step's band")


def _of_search(doc: Mapping[str, Any]) -> Iterator[Identity]:
    search = doc["search"]
    tokens = search["global_sequences"] * search["sequence_length"]
    computed = min(search["computed"], search["seen"])
    yield Identity("search.computed", search["computed"], computed, "no more than was seen")
    choices: dict[str, Mapping[str, Any]] = {
        f"search.{key}[{n}]": choice
        for key in ("plans", "front")
        for n, choice in enumerate(search[key])
    }
    if (first := doc.get(_RECOMMENDED)) is not None:
        choices[_RECOMMENDED] = first
        for n, other in enumerate(first["others"]):
            choices[f"{_RECOMMENDED}.others[{n}]"] = other["choice"]
    for at, choice in choices.items():
        mesh, devices = choice["mesh"], choice["devices"]
        ranks = _workers(mesh) + mesh["servers"]
        yield Identity(f"{at}.devices", devices, ranks, "ranks of the mesh")
        each = search["global_sequences"] / _sequences_at_once(mesh, choice)
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
    for end, price in enumerate(choice["price_band"]):
        ratio = choice["step_band_s"][end] / choice["step_s"]
        wanted = choice["price_of_a_million_tokens"] * ratio
        yield Identity(f"{at}.price_band[{end}]", price, wanted, "as the step's")


def require_page(page: PageDocument, document: Mapping[str, Any]) -> None:
    """Look for the numbers of a document on its page; ProofFailed names each that it lacks.

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
    """Yield the path of each number that a page has, its place there, and its text."""
    run = "plan" in doc
    at, estimate = ("estimate", doc["estimate"]) if run else first_of_search(doc)
    step, held = estimate["step_s"], estimate["held_bytes"]
    yield f"{at}.step_s", FACTS, f"{step:.4g} s"
    yield f"{at}.step_s", VERDICT, f"a step takes {step:.4g} s"
    yield f"{at}.tokens_per_s_per_device", FACTS, f"{estimate['tokens_per_s_per_device']:,.0f}"
    yield f"{at}.mfu", FACTS, f"{100 * estimate['mfu']:.1f} %"
    yield f"{at}.held_bytes", FACTS, binary_bytes(held)
    size, _ = binary_unit(min(held, GIB))
    for key, place, unit in (("bytes", "memory-terms", size), ("seconds", "step", 1)):
        for name, value in estimate[key].items():
            if value > 0:
                yield f"{at}.{key}.{name}", place, f"{value / unit:.4g}"
    if run:
        yield from _shown_of_run(doc)


def _shown_of_run(doc: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    timing = doc["pipeline"]["timing"]
    if timing is not None and doc["plan"]["layout"]["mesh"]["pp"] > 1:
        seconds, idle = timing["makespan_s"], timing["bubble_fraction_with_transfers"]
        place, name = f"schedule{SENTENCE}", "pipeline.timing"
        yield f"{name}.makespan_s", place, f"{seconds:.4g} s from the first action to the last"
        yield f"{name}.bubble_fraction_with_transfers", place, f"idle for {100 * idle:.1f} %"
    for row in doc["stages"]:
        at = f"stages[{row['pp_rank']}]"
        for key, place in (("held", "held"), ("held_in_a_step_at_most", "step-bytes")):
            for term in row[key]:
                yield f"{at}.{key}.{term['name']}", place, binary_bytes(term["bytes"])
        for axis, sent in row["sent_bytes_by_axis"].items():
            yield f"{at}.sent_bytes_by_axis.{axis}", "sent", f"{sent:,}"
        for term in row["sent_bytes_per_step"] if row["sent_bytes_by_axis"] else ():
            yield f"{at}.sent.{term['name']}", "messages", decimal_bytes(term["bytes"])


def first_of_search(doc: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the path of the first plan of a search's document, and the plan."""
    if (recommended := doc.get(_RECOMMENDED)) is not None:
        return _RECOMMENDED, recommended
    return "search.plans[0]", doc["search"]["plans"][0]
