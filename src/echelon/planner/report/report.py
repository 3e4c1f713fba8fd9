# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan` shows of a plan: what each rank holds, who talks to whom, and how much.

Every number is read from `cost/` and `schedule/`; nothing is computed here but sums.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil, prod
from typing import Any

from echelon.core.errors import ProofFailed
from echelon.core.messages.plurals import in_singular
from echelon.core.parameters import num_parameters, parameters, router_biases
from echelon.core.plan import Plan
from echelon.core.rulebook.planner import PLAN_NUMBERS_AGREE
from echelon.core.units import GIB, binary_bytes, binary_unit, decimal_bytes
from echelon.cost.bytes.terms import Pool
from echelon.cost.seconds.from_plan import peak_flops
from echelon.cost.seconds.kernels import EMBEDDING_TABLES
from echelon.cost.seconds.unit_times import UnitTimes, unit_times_from_formulas
from echelon.layout.context_work import attention_imbalance, scores_by_rank
from echelon.planner.lint.checks import lint, lint_rows, plan_fits, why_not_fit
from echelon.planner.lint.memory import DOES_NOT_FIT
from echelon.planner.predict.estimate import Estimate, estimate_plan
from echelon.planner.predict.stage_rows import (
    StageRow,
    group_equal_rows,
    most_held_bytes,
    most_step_bytes,
    pool_bytes,
    sent_by_axis,
    stage_rows,
)
from echelon.planner.report.estimate import SMALLEST_SHARE, estimate_json, rate_lines, terms_beside
from echelon.planner.report.head import experts_json, fact_lines, head_facts
from echelon.planner.report.memory import memory_sections, servers_json
from echelon.planner.report.pipeline import MOST_SHOWN, pipeline_json, pipeline_parts
from echelon.planner.report.printed_numbers import (
    Identity,
    first_of_search,
    require_agreement,
    require_identities,
)
from echelon.planner.report.sent import group_lines, groups, sent_sections
from echelon.planner.view.figure_text import bars_lines, mesh_lines, painted, waterfall_lines
from echelon.planner.view.mesh_map import mesh_map
from echelon.planner.view.plan_figures import plan_bars, waterfall
from echelon.planner.view.text_layout import WIDTH, fill_text, fit_page, section_text

MOST_NOTES = 4  # notes


def plan_json(
    plan: Plan, times: UnitTimes | None = None, assumed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the plan and its report as JSON values; `assumed` lists defaults.

    ProofFailed if a number differs from the numbers that it follows from.
    """
    rows = stage_rows(plan)
    memory = plan.cluster.device.memory_bytes
    document: dict[str, Any] = {
        "plan": json.loads(plan.to_json()),
        "hash": plan.content_hash(),
        "num_parameters": num_parameters(plan.model),
        "assumed": [*plan.model.assumed, *assumed],
        "num_microbatches": plan.num_microbatches,
        "fits": plan_fits(plan),
        "held_bytes_fit": most_held_bytes(plan, rows) <= memory,
        "step_bytes_fit": most_step_bytes(plan, rows) <= memory,
        "context": _context_json(plan),
        "experts": experts_json(plan),
        "stages": [_row_json(row) for row in rows],
        "servers": servers_json(plan),
        "estimate": estimate_json(estimate_plan(plan, times)),
        "pipeline": pipeline_json(plan, times or unit_times_from_formulas(plan)),
        "notes": [asdict(finding) for finding in lint(plan)],
        "groups": {axis: [list(group) for group in found] for axis, found in groups(plan).items()},
    }
    require_agreement(document)
    require_identities(_model_identities(plan, document))
    return document


def _model_identities(plan: Plan, doc: Mapping[str, Any]) -> Iterator[Identity]:
    """Yield counts of a model's weights, FLOPs, tokens and scores, each counted anew."""
    shape, numbers = plan.model, plan.mathematics
    length, experts = numbers.sequence_length, shape.experts
    routed = 0 if experts is None else experts.num_experts
    specs = [*parameters(shape), *router_biases(shape)]
    total = sum(prod(spec.shape) for spec in specs)
    yield Identity("num_parameters", doc["num_parameters"], total, "elements of all tensors")
    # A token is routed to as many experts as if there were no others.
    top = routed if experts is None else experts.top_k
    active = sum(prod(spec.shape) for spec in specs if spec.expert is None or spec.expert < top)
    if experts is not None:
        of_experts = doc["experts"]
        name, by = "experts.num_active_parameters", "elements that multiply a token"
        yield Identity(name, of_experts["num_active_parameters"], active, by)
        if (factor := numbers.balance.capacity_factor) is not None:
            room = ceil(round(factor * length * top / routed, 9))
            by = "capacity_factor x tokens x top_k / experts"
            yield Identity("experts.capacity", of_experts["capacity"] or 0, room, by)
    if shape.window is not None or shape.latent is not None or not shape.causal:
        return
    queries, positions = shape.layers * shape.heads * shape.head_dim, (length + 1) / 2
    if doc["context"] is not None:
        heads = shape.heads // plan.mesh.tp
        pairs = heads * plan.layout.microbatch_sequences * length * positions
        scores = sum(doc["context"]["scores_by_rank"])
        yield Identity("context.scores_by_rank", scores, pairs, "pairs of the mask x heads")
    if shape.lora is None:
        tables = [s for s in specs if s.name in EMBEDDING_TABLES]
        multiplied = active - sum(prod(spec.shape) for spec in tables)
        multiplied += shape.vocab * shape.hidden if shape.tied else 0
        estimate = doc["estimate"]
        rate = estimate["tokens_per_s_per_device"]
        rate /= peak_flops(plan.cluster, numbers.precision.parameters)
        by = "6 x weights + 12 x pairs x widths, x tokens per second / peak"
        for name, keys in (("mfu", length), ("causal_mfu", positions)):
            flops = 6.0 * multiplied + 12.0 * queries * keys
            yield Identity(f"estimate.{name}", estimate[name], flops * rate, by)


def _context_json(plan: Plan) -> dict[str, Any] | None:
    if plan.mesh.cp == 1:
        return None
    return {
        "degree": plan.mesh.cp,
        "kind": plan.layout.context.kind,
        "ulysses_degree": plan.layout.context.ulysses_degree,
        "ring_degree": plan.placement.ring_degree,
        "positions_per_rank": plan.mathematics.sequence_length // plan.mesh.cp,
        "scores_by_rank": list(scores_by_rank(plan)),
        "imbalance": attention_imbalance(plan),
    }


def _row_json(row: StageRow) -> dict[str, Any]:
    pools: list[Pool] = [*dict.fromkeys(term.pool for term in row.held)]
    return {
        "pp_rank": row.pp_rank,
        "stages": list(row.stages),
        "ranks": list(row.ranks),
        "blocks": list(row.blocks),
        "held": [asdict(term) for term in row.held],
        "held_bytes_by_pool": {pool: pool_bytes(row.held, pool) for pool in pools},
        "held_in_a_step_at_most": [asdict(term) for term in row.step],
        "sent_bytes_per_step": [{**asdict(term), "bytes": term.bytes} for term in row.sent],
        "sent_bytes_by_axis": sent_by_axis(row),
        "muon_bytes_by_rank": {str(rank): sent for rank, sent in row.muon.items()},
        "choices": [asdict(choice) for choice in row.choices],
    }


def plan_text(
    plan: Plan,
    times: UnitTimes | None = None,
    found: str = "",
    assumed: Sequence[str] = (),
    *,
    columns: int = WIDTH,
) -> str:
    """Return the plan as the page that a person reads; a plan that does not fit begins with that.

    Stages last as `times` say, or as modelled without them; `found` is the note of a
    search, `assumed` lists defaults that nobody set.
    """
    runs = group_equal_rows(stage_rows(plan))
    takes = estimate_plan(plan, times)
    wrong = why_not_fit(plan)
    lines = [*fact_lines(head_facts(plan, assumed)), *rate_lines(takes, label=9, columns=columns)]
    parts = [fill_text(wrong, rest="  ", columns=columns)] if wrong else []
    parts += ["\n".join(lines), *_assumed(plan, columns=columns)]
    parts += (section_text(one, columns=columns) for one in memory_sections(plan, runs))
    if plan.mesh.world_size > 1:
        groups_of_axes = "\n".join(group_lines(plan, columns=columns))
        parts.append(f"Ranks that talk to one another:\n\n{groups_of_axes}")
    parts += (section_text(one, columns=columns) for one in sent_sections(plan, runs))
    if plan.num_stages > 1:
        parts.extend(
            pipeline_parts(plan, times or unit_times_from_formulas(plan), found, columns=columns)
        )
    parts.append(
        "A step takes, and its fullest rank holds, activations included:\n\n"
        f"{terms_beside(takes, plan.cluster.device.memory_bytes, columns=columns)}"
    )
    if notes := lint_rows(plan, columns, most=MOST_NOTES, without=(DOES_NOT_FIT,)):
        parts.append("Notes (`echelon explain ID` says more):\n\n" + "\n".join(notes))
    return fit_page("\n\n".join(parts), columns=columns) + "\n"


def pictures_text(plan: Plan, estimate: Estimate, *, columns: int = WIDTH) -> str:
    """Return memory bars, the waterfall of a step and the mesh map as text, one below the other."""
    bars = plan_bars(plan, estimate.bytes)
    ranks = mesh_map(plan.mesh, plan.cluster, expert_tp=plan.layout.experts.expert_tp)
    parts = [
        ("What ranks hold at their peak, at most", bars_lines(bars, columns=columns)),
        ("Seconds of a step", waterfall_lines(waterfall(estimate.seconds), columns=columns)),
        ("Where ranks are", mesh_lines(ranks, columns=columns)),
    ]
    return "\n".join(f"{title}:\n\n{painted(lines)}" for title, lines in parts)


def _assumed(plan: Plan, *, columns: int) -> Iterator[str]:
    """Yield what is taken to be so of a model whose architecture is not known."""
    if plan.model.assumed:
        said = "and its user has said yes to that" if plan.model.assume else "and may be otherwise"
        rows = (fill_text(f"  {one}", rest="    ", columns=columns) for one in plan.model.assumed)
        yield f"Assumed of {plan.model.name}, {said}:\n\n" + "\n".join(rows)


def require_text(text: str, document: Mapping[str, Any]) -> None:
    """Look for the numbers of a document in its text; ProofFailed names those that it lacks."""
    words = " ".join(text.split())
    wrong = [
        PLAN_NUMBERS_AGREE.problem(f"{path} is {number}, and the text of the plan does not say so")
        for path, number in _in_text(document)
        if in_singular(number) not in words
    ]
    if wrong:
        raise ProofFailed(wrong)


def _in_text(doc: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield numbers of a document, each as its text has it."""
    if "plan" not in doc:
        yield from _of_search(doc)
        return
    estimate, path = doc["estimate"], "estimate"
    yield from _rates(path, estimate)
    size, unit = binary_unit(min(estimate["held_bytes"], GIB))
    low, high = estimate["held_band_bytes"]
    held = f"{estimate['held_bytes'] / size:.1f} {unit} ({low / size:.1f} to {high / size:.1f})"
    yield f"{path}.held_bytes", f"memory {held}"
    for key, room, each in (
        ("seconds", estimate["step_s"], 1),
        ("bytes", doc["plan"]["cluster"]["device"]["memory_bytes"], size),
    ):
        for name, value in estimate[key].items():
            if value > 2 * SMALLEST_SHARE * room:
                share = f"{value / each:.4g} {100 * value / room:.1f} %"
                yield f"{path}.{key}.{name}", f"{name} {share}"
    for row in doc["stages"]:
        yield from _of_row(f"stages[{row['pp_rank']}]", row)
    timing = doc["pipeline"]["timing"]
    if timing is not None and len(doc["pipeline"]["blocks"]) > 1:
        yield from _of_timing("pipeline.timing", timing)


def _rates(path: str, estimate: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    low, high = estimate["step_band_s"]
    yield f"{path}.step_s", f"step {estimate['step_s']:.4g} s ({low:.4g} to {high:.4g})"
    rate = f"{estimate['tokens_per_s_per_device']:.0f} tokens/s of a device"
    yield f"{path}.tokens_per_s_per_device", rate
    yield f"{path}.mfu", f"MFU {100 * estimate['mfu']:.1f} (full attention"


def _of_search(doc: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    path, estimate = first_of_search(doc)
    yield from _rates(path, estimate)
    if (price := estimate["price_of_a_million_tokens"]) is None:
        return
    low, high = estimate["price_band"]
    text = f"price {price:.4g} ({low:.4g} to {high:.4g}) for a million tokens"
    yield f"{path}.price_of_a_million_tokens", text
    if estimate["devices"] < doc["search"]["devices"]:
        yield f"{path}.price_with_idle_devices", f"{estimate['price_with_idle_devices']:.4g} with"


def _of_row(at: str, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for kind in ("held", "held_in_a_step_at_most"):
        for term in row[kind]:
            yield f"{at}.{kind}.{term['name']}", binary_bytes(term["bytes"])
    for term in row["sent_bytes_per_step"] if row["sent_bytes_by_axis"] else ():
        yield f"{at}.sent.{term['name']}", decimal_bytes(term["bytes"])
    for axis, sent in row["sent_bytes_by_axis"].items():
        yield f"{at}.sent_bytes_by_axis.{axis}", decimal_bytes(sent)


def _of_timing(at: str, timing: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, words in (
        ("bubble_fraction", "% is bubble"),
        ("bubble_fraction_with_transfers", "% with transfers"),
        ("bubble_fraction_of_equal_stages", "% if all stages"),
    ):
        yield f"{at}.{key}", f"{100 * timing[key]:.1f} {words}"
    yield f"{at}.num_messages", f"sends {timing['num_messages']} messages"
    peaks = timing["peak_in_flight_of_rank"]
    if len(peaks) <= MOST_SHOWN:
        same = len({*peaks}) == 1
        text = f"at most {peaks[0]}" if same else " ".join(map(str, peaks))
        yield f"{at}.peak_in_flight_of_rank", text
