# SPDX-License-Identifier: Apache-2.0
"""The page of a plan: where ranks are, what they hold and send, where the seconds of a step go."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.core.version import __version__
from echelon.cost.seconds.unit_times import UnitTimes, stage_durations, unit_times_from_formulas
from echelon.page.document import Fact, PageDocument, Section
from echelon.page.figures import (
    BarRow,
    BarsFigure,
    DataTable,
    WaterfallBarPart,
    WaterfallFigure,
    WaterfallRow,
)
from echelon.page.mesh import mesh_section
from echelon.page.schedule import chart_from_timelines, schedule_section
from echelon.planner.lint.checks import lint, plan_fits
from echelon.planner.predict.bands import (
    held_bytes_band,
    mfu_band,
    step_band,
    tokens_per_s_band,
)
from echelon.planner.predict.estimate import Estimate, estimate_plan
from echelon.planner.predict.stage_rows import place_head, sent_by_axis, stage_rows
from echelon.planner.view.memory import MemoryBars, memory_bars, memory_rows_from_plan
from echelon.planner.view.terms import TONES
from echelon.planner.view.waterfall import Waterfall, waterfall
from echelon.telemetry.timeline import pipelines_from_plan, planned_timelines

PLANNED = "planned"
_OF_A_PROCESS = ("slack", "context", "nccl")


def plan_page(plan: Plan, times: UnitTimes | None = None) -> PageDocument:
    """Return the page of a plan, its stages timed by `times`, or modelled."""
    estimate = estimate_plan(plan, times)
    return PageDocument(
        title=f"{plan.name}: plan",
        subject=subject_of_plan(plan),
        verdict=_verdict(plan, estimate),
        good=plan_fits(plan),
        facts=tuple(_facts(plan, estimate)),
        sections=(*plan_sections(plan, estimate, times),),
        made_by=f"Echelon {__version__}",
    )


def subject_of_plan(plan: Plan) -> str:
    """Return what a plan is about: a model on a cluster, and its hash."""
    count = short_count(num_parameters(plan.model))
    return (
        f"{plan.model.name}, {count} parameters, on {plan.mesh.world_size:,} ranks of "
        f"{plan.cluster.name}; plan {plan.content_hash()[:12]}"
    )


def plan_sections(
    plan: Plan, estimate: Estimate, times: UnitTimes | None = None
) -> Iterator[Section]:
    """Yield the parts that every page of a plan has."""
    if plan.model.assumed:
        yield _assumed_section(plan)
    yield memory_section(plan, estimate)
    yield step_section(estimate)
    if plan.num_stages > 1:
        durations = stage_durations(plan, times or unit_times_from_formulas(plan))
        lines = planned_timelines(pipelines_from_plan(plan), durations)
        yield schedule_section(plan, (chart_from_timelines(PLANNED, lines[:1]),))
    if plan.mesh.world_size > 1:
        yield mesh_section(plan)
        yield sent_section(plan)
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


def _assumed_section(plan: Plan) -> Section:
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


def _verdict(plan: Plan, estimate: Estimate) -> str:
    """Return the sentence at the top."""
    memory = plan.cluster.device.memory_bytes
    held = estimate.bytes_held
    share = f"{100 * held / memory:.1f} %" if memory else "-"
    says = "fits" if plan_fits(plan) else "does not fit"
    return (
        f"The plan {says}: its fullest rank holds {binary_bytes(held)} of {binary_bytes(memory)} "
        f"({share}), and a step takes {estimate.step_s:.4g} s."
    )


def _facts(plan: Plan, estimate: Estimate) -> Iterator[Fact]:
    step, held = step_band(estimate), held_bytes_band(estimate)
    tokens, mfu = tokens_per_s_band(estimate), mfu_band(estimate)
    yield Fact(
        name="step",
        value=f"{step.value:.4g} s",
        note=f"{step.low:.4g} to {step.high:.4g}",
    )
    yield Fact(
        name="tokens/s of a device",
        value=f"{tokens.value:,.0f}",
        note=f"{tokens.low:,.0f} to {tokens.high:,.0f}",
    )
    yield Fact(
        name="MFU (full attention)",
        value=f"{100 * mfu.value:.1f} %",
        note=f"{100 * mfu.low:.1f} to {100 * mfu.high:.1f}; causal "
        f"{100 * estimate.causal_mfu:.1f} %",
    )
    yield Fact(
        name="memory of the fullest rank",
        value=binary_bytes(held.value),
        note=f"{binary_bytes(held.low)} to {binary_bytes(held.high)}",
    )
    yield Fact(
        name="global batch",
        value=f"{plan.mathematics.global_sequences:,} sequences",
        note=f"of {plan.mathematics.sequence_length:,} tokens",
    )


def memory_section(plan: Plan, estimate: Estimate) -> Section:
    """Return the part that says what ranks hold at their peak, by term."""
    bars = _memory_bars(plan, estimate)
    return Section(
        id="memory",
        title="What ranks hold at their peak",
        summary=". ".join(map(bars.says, bars.rows)) + ".",
        figure=bars_figure(bars),
        table=_memory_table(bars),
    )


def _memory_bars(plan: Plan, estimate: Estimate) -> MemoryBars:
    """Return the fullest rank as it is planned, above what each place of the pipeline holds."""
    beside = {name: estimate.bytes[name] for name in _OF_A_PROCESS if name in estimate.bytes}
    used = estimate.bytes_held - sum(beside.values())
    rows = [("fullest, planned", dict(estimate.bytes))]
    for label, terms in memory_rows_from_plan(plan):
        own = dict(beside)
        if "slack" in own and used > 0:
            own["slack"] *= sum(terms.values()) / used
        rows.append((label, {**terms, **own}))
    return memory_bars(rows, plan.cluster.device.memory_bytes)


def bars_figure(bars: MemoryBars) -> BarsFigure:
    """Return bars of bytes as the page draws them."""
    kinds = tuple(kind.name for kind in bars.kinds)
    return BarsFigure(
        kinds=kinds,
        limit=bars.limit_bytes,
        limit_text=binary_bytes(bars.limit_bytes) if bars.limit_bytes else "",
        rows=tuple(
            BarRow(
                label=row.label,
                values=tuple(row.terms.get(kind, 0.0) for kind in kinds),
                texts=tuple(binary_bytes(row.terms.get(kind, 0.0)) for kind in kinds),
                total=row.total,
                total_text=binary_bytes(row.total),
                share_text=bars.share(row),
                over=bars.over(row),
            )
            for row in bars.rows
        ),
    )


def _memory_table(bars: MemoryBars) -> DataTable:
    kinds = [kind.name for kind in bars.kinds]
    return DataTable(
        head=("rank", *kinds, "total", "of the device"),
        rows=tuple(
            (
                row.label,
                *(binary_bytes(row.terms.get(kind, 0.0)) for kind in kinds),
                binary_bytes(row.total),
                bars.share(row),
            )
            for row in bars.rows
        ),
        right=tuple(range(1, len(kinds) + 3)),
    )


def step_section(estimate: Estimate) -> Section:
    """Return the part that says where the seconds of a step go."""
    fall, band = waterfall(estimate.seconds), step_band(estimate)
    tones = [
        f"{fall.shown.share(*terms)} {name}"
        for tone, (_, name) in TONES.items()
        if (terms := fall.of_tone(tone))
    ]
    return Section(
        id="step",
        title="Seconds of a step",
        summary=f"A step takes {fall.shown.value()}: {', '.join(tones)}.",
        figure=_waterfall_figure(fall, (band.low, band.high)),
        table=DataTable(
            head=("term", "seconds", "share"),
            rows=(
                *((n, fall.shown.value(n), fall.shown.share(n)) for n in fall.terms),
                ("total", fall.shown.value(), fall.shown.share()),
            ),
            right=(1, 2),
        ),
        notes=(f"Four of five measured runs lie between {band.low:.4g} and {band.high:.4g} s.",),
    )


def _waterfall_figure(fall: Waterfall, band: tuple[float, float]) -> WaterfallFigure:
    return WaterfallFigure(
        rows=tuple(
            WaterfallRow(
                label=bar.label,
                start=bar.start,
                parts=tuple(
                    WaterfallBarPart(tone=tone, seconds=seconds)
                    for tone, seconds in bar.parts.items()
                ),
                text=fall.shown.value(*bar.terms),
                share_text=fall.shown.share(*bar.terms),
            )
            for bar in fall.bars
        ),
        total=fall.total,
        total_text=fall.shown.value(),
        low=band[0],
        high=band[1],
        band_text=f"{band[0]:.4g} to {band[1]:.4g} s",
    )


def sent_section(plan: Plan) -> Section:
    """Return the part that says what a rank sends in a step, by axis."""
    rows = stage_rows(plan)
    by_row = [sent_by_axis(row) for row in rows]
    axes = list(dict.fromkeys(axis for sent in by_row for axis in sent))
    most = max((sum(sent.values()) for sent in by_row), default=0)
    bars = BarsFigure(
        kinds=tuple(axes),
        limit=0.0,
        limit_text="",
        rows=tuple(
            BarRow(
                label=f"{place_head(rows)} {row.pp_rank}",
                values=tuple(float(sent.get(axis, 0)) for axis in axes),
                texts=tuple(decimal_bytes(sent.get(axis, 0)) for axis in axes),
                total=float(sum(sent.values())),
                total_text=decimal_bytes(sum(sent.values())),
                share_text="",
                over=False,
            )
            for row, sent in zip(rows, by_row, strict=True)
        ),
    )
    return Section(
        id="sent",
        title="What a rank sends in a step",
        summary=f"The rank that sends most sends {decimal_bytes(most)} in a step.",
        figure=bars,
        table=DataTable(
            head=(place_head(rows), *axes, "bytes in all"),
            rows=tuple(
                (
                    str(row.pp_rank),
                    *(f"{sent.get(axis, 0):,}" for axis in axes),
                    f"{sum(sent.values()):,}",
                )
                for row, sent in zip(rows, by_row, strict=True)
            ),
            right=tuple(range(1, len(axes) + 2)),
        ),
    )
