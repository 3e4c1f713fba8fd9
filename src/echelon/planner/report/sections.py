# SPDX-License-Identifier: Apache-2.0
"""Sections of a plan's document: what ranks hold and send, where the seconds of a step go, notes.

The report of `echelon plan` has the tables as text, the page and a notebook have all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.plan import Plan
from echelon.planner.lint.checks import lint
from echelon.planner.predict.bands import step_band
from echelon.planner.predict.estimate import Estimate
from echelon.planner.predict.stage_rows import group_equal_rows, stage_rows
from echelon.planner.report.estimate import byte_terms, seconds_terms
from echelon.planner.report.head import head_facts
from echelon.planner.report.memory import memory_sections
from echelon.planner.report.sent import sent_figure, sent_sections
from echelon.planner.view.document import DataTable, Section
from echelon.planner.view.mesh_map import mesh_section
from echelon.planner.view.plan_figures import bar_sentence, plan_bars, waterfall


def run_sections(plan: Plan) -> Iterator[Section]:
    """Yield what a plan is, and what is assumed of its model."""
    yield Section(
        id="run",
        title="The run",
        summary="Its model, its mesh, and the choices of its layout.",
        table=DataTable(head=("", "what"), rows=tuple(head_facts(plan))),
    )
    if plan.model.assumed:
        yield _assumed(plan)


def held_sections(plan: Plan, estimate: Estimate) -> Iterator[Section]:
    """Yield what ranks hold: at their peak, by term, between steps, and in a step."""
    yield memory_section(plan, estimate)
    yield Section(
        id="memory-terms",
        title="Terms of the fullest rank",
        summary="Its fullest rank holds, activations included:",
        table=byte_terms(estimate, plan.cluster.device.memory_bytes, least=0.0),
    )
    yield from memory_sections(plan, group_equal_rows(stage_rows(plan)))


def message_sections(plan: Plan) -> Iterator[Section]:
    """Yield where ranks are, and what each sends in a step."""
    if plan.mesh.world_size > 1:
        yield mesh_section(plan)
        yield sent_figure(plan)
        # The last one has the bytes of the figure again, rounded.
        yield from [*sent_sections(plan, group_equal_rows(stage_rows(plan)))][:1]


def note_sections(plan: Plan) -> Iterator[Section]:
    """Yield what is seldom wanted of a plan."""
    if found := lint(plan):
        yield Section(
            id="notes",
            title="Notes",
            summary="What is seldom wanted, and what would do. `echelon explain ID` says more.",
            table=DataTable(
                head=("id", "about", "what", "do"),
                rows=tuple((one.id, one.severity, one.message, one.do) for one in found),
            ),
        )


def _assumed(plan: Plan) -> Section:
    """Return the part that lists what is taken to be so of a model that is not known."""
    return Section(
        id="assumed",
        title="What is assumed of the model",
        summary=(
            f"The architecture of {plan.model.name} is not known. "
            + (
                "Its user has said yes to what is assumed."
                if plan.model.assume
                else "It is planned, and trained where model.assume = true says yes to all of this."
            )
        ),
        table=DataTable(head=("assumed",), rows=tuple((one,) for one in plan.model.assumed)),
    )


def memory_section(plan: Plan, estimate: Estimate) -> Section:
    """Return bars of what ranks hold at their peak, by term."""
    bars = plan_bars(plan, estimate.bytes)
    return Section(
        id="memory",
        title="What ranks hold at their peak",
        summary=". ".join(bar_sentence(bars, row) for row in bars.rows) + ".",
        figure=bars,
        table=DataTable(
            head=("rank", *bars.kinds, "total", "of the device"),
            rows=tuple(
                (row.label, *row.texts, row.total_text, row.share_text) for row in bars.rows
            ),
            right=tuple(range(1, len(bars.kinds) + 3)),
        ),
    )


def step_section(estimate: Estimate) -> Section:
    """Return the waterfall of a step, and its terms with their bands."""
    band = step_band(estimate)
    fall = waterfall(estimate.seconds, (band.low, band.high))
    tones = ", ".join(f"{one.share_text} {one.name}" for one in fall.tones)
    return Section(
        id="step",
        title="Seconds of a step",
        summary=f"A step takes {fall.total_text}: {tones}.",
        figure=fall,
        table=seconds_terms(estimate, least=0.0),
        notes=(f"Four of five measured runs lie between {band.low:.4g} and {band.high:.4g} s.",),
    )
