# SPDX-License-Identifier: Apache-2.0
"""What `echelon plan` shows of a plan: what each rank holds, who talks to whom, and how much.

Every number is read from `cost/` and `schedule/`; nothing is computed here but sums.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.cost.bytes.terms import Pool
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
from echelon.planner.report.estimate import estimate_json, rate_lines, terms_beside
from echelon.planner.report.head import experts_json, fact_lines, head_facts
from echelon.planner.report.memory import memory_sections, servers_json
from echelon.planner.report.pipeline import pipeline_json, pipeline_parts
from echelon.planner.report.printed_numbers import require_agreement
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
    return document


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
