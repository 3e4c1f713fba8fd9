# SPDX-License-Identifier: Apache-2.0
"""`echelon explain choose`: what published guides say of a model and a cluster, and who is right.

Every tree is walked with the reader's own numbers, every row of the size guide that covers them is
checked for fit; then where guides differ from one another, from the run and from the planner. All
of it is data of `handbook/guides/`, every number a formula of `cost/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.cli.explain.context import shown_s
from echelon.cli.explain.entries import guide_rows
from echelon.cli.flags import bad_argument
from echelon.config.load import resolve
from echelon.config.setting_layers import SettingLayers, gather_layers, parse_set_flags
from echelon.core.plan import Plan
from echelon.core.units import gib, short_count
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.handbook.errata.claims import SOURCES
from echelon.handbook.guides.practices import (
    NAMED,
    PRACTICES,
    Advice,
    SituationAdvice,
    StrategyRow,
    advise,
    compare_strategies,
    step_seconds_of,
)
from echelon.handbook.guides.situation import PlanSituation
from echelon.handbook.guides.strategy import StrategyOutcome
from echelon.planner.predict.split_memory import GuideSplit
from echelon.planner.search.request import (
    LAYOUT_KEYS,
    LAYOUT_TABLES,
    SearchAim,
    SearchRequest,
    is_hf_config,
    make_request,
)
from echelon.planner.search.search import search
from echelon.planner.view.text_layout import WIDTH, table, wrap_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseQuestion:
    """Hold the run that was asked about, what guides say of it, and the planner's best plan.

    `defaults_taken` says what was taken where the run says nothing. `software` is the trainer of
    which the seconds are.
    """

    plan: Plan
    advised: SituationAdvice
    best: Plan | None = None
    step_s: float | None = None
    defaults_taken: tuple[str, ...] = ()
    software: TrainerConstants = field(default_factory=TrainerConstants)

    def seconds(self, advice: Advice) -> float | None:
        """Return the seconds of a step of what an advice comes to; None where it does not fit."""
        found = advice.outcome
        if found is None or not found.fits:
            return None
        return step_seconds_of(self.plan, found.split, advice.strategy, self.software)

    @property
    def compared(self) -> tuple[tuple[str, Plan], ...]:
        """Return the plans that guides are compared with: the run's own where it is a split."""
        plans = [("this run", self.plan)] if self.plan.mesh.world_size > 1 else []
        return (*plans, *([("the planner", self.best)] if self.best is not None else []))


def ask_choose(
    run: str | None = None, settings: Sequence[str] = (), cluster: str | None = None
) -> ChooseQuestion:
    """Return the question; ConfigError without a run, or where it is wrong.

    A run is what a search takes: a run file, a preset of a run or model, or a config.json.
    """
    if run is None:
        raise bad_argument(
            "which strategy fits depends on the model and the cluster: name a run",
            "echelon explain choose llama3-8b --cluster 8xh100",
            "echelon explain choose config.json --cluster 8xh100",
            "echelon explain choose run.toml",
        )
    # The planner is free to split the run as it likes: what the run says of that is left aside.
    free = [one for one in settings if not _is_layout(one)]
    request = make_request(run, cluster=cluster, settings=free, aim=SearchAim(top=1))
    plan = _plan_with_settings(request, run, settings)
    best = search(request).best
    return ChooseQuestion(
        plan=plan,
        advised=advise(PlanSituation.of(plan)),
        best=best and best.plan,
        step_s=best and best.estimate.step_s,
        defaults_taken=request.defaults_taken,
        software=request.software,
    )


def _plan_with_settings(request: SearchRequest, run: str, settings: Sequence[str]) -> Plan:
    """Return the plan of the run with the layout that it has, or that `settings` say."""
    if is_hf_config(run):
        own = SettingLayers()
        own.add(parse_set_flags(settings)[0])
    else:
        own = gather_layers(run, settings)
    layout = {key: entry for key, entry in own.merged().items() if _is_layout(key)}
    gathered = SettingLayers(layers=[*request.layers, layout], problems=own.problems)
    return resolve(gathered, request.one_rank_run.name, None).plan


def _is_layout(setting: str) -> bool:
    key = setting.partition("=")[0].strip()
    return key.startswith(LAYOUT_TABLES) or key in LAYOUT_KEYS


def choose_json(question: ChooseQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    situation, advised = question.advised.situation, question.advised
    return {
        "model": situation.model.name,
        "num_parameters": situation.num_parameters,
        "cluster": situation.plan.cluster.name,
        "num_devices": situation.num_devices,
        "memory_bytes": situation.memory,
        "guides": [
            _advice_json(advice) | {"step_s": question.seconds(advice)} for advice in advised.advice
        ],
        "preferences": [
            {
                "id": preference.id,
                "axis": preference.axis,
                "factor": preference.factor,
                "question": preference.question.text,
                **asdict(answer),
            }
            for preference, answer in advised.preferences
        ],
        "conflicts": [
            {"one": one, "other": other, "where": list(where)}
            for one, other, where in advised.conflicts
        ],
        "compared": [
            {"with": name, "guide": advice.id, "differs": list(differs)}
            for name, plan in question.compared
            for advice, differs in advised.against(plan)
        ],
        "strategies": [
            {
                "name": row.kind.strategy.name,
                "cuts": row.kind.cuts,
                "sends": row.kind.sends,
                "claims": list(row.kind.claims),
                "split": row.outcome and asdict(row.outcome.split),
                "fits": row.outcome and row.outcome.fits,
                "step_s": row.step_s,
                "across_nodes": list(row.across_nodes),
            }
            for row in compare_strategies(situation, question.software)
        ],
        "planner": question.best
        and {
            "mesh": asdict(question.best.mesh),
            "zero_stage": question.best.layout.zero.stage,
            "step_s": question.step_s,
        },
        "defaults_taken": list(question.defaults_taken),
        "practices": [asdict(practice) for practice in PRACTICES],
        "layouts": [
            {"id": one.id, "name": one.name, "states_bytes": one.states_bytes, "fits": one.fits}
            for one in NAMED
        ],
    }


def _advice_json(advice: Advice) -> dict[str, Any]:
    found = advice.outcome
    return {
        "id": advice.id,
        "source": advice.source,
        "steps": [
            {"node": node.id, "question": node.question.text, **asdict(answer)}
            for node, answer in advice.steps
        ],
        "strategy": advice.strategy.name,
        "allows": advice.strategy.says(),
        "split": found and asdict(found.split),
        "held_bytes": found and found.held.total,
        "fits": found and found.fits,
        "note": advice.note,
    }


def choose_text(question: ChooseQuestion, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    return "\n\n".join("\n".join(part) for part in _parts(question, columns=columns)) + "\n"


def _parts(question: ChooseQuestion, *, columns: int) -> Iterator[list[str]]:
    advised = question.advised
    yield list(_head(advised.situation, question.defaults_taken, columns=columns))
    for advice in advised.advice:
        yield list(_advice(advice, advised.situation, question.seconds(advice), columns=columns))
    rows = compare_strategies(advised.situation, question.software)
    head = "Strategies side by side, on all devices (2 psi: cost/bytes/model_sizes.py)"
    yield [
        head,
        "",
        *(line for row in rows for line in _strategy(row, advised.situation, columns=columns)),
    ]
    yield [
        "Reasons to raise a degree (llm-training, section 8)",
        "",
        *_preferences(advised, columns=columns),
    ]
    yield ["Where guides differ", "", *_conflicts(advised, columns=columns)]
    for name, plan in question.compared:
        seconds = question.step_s if plan is question.best else None
        much = "" if seconds is None else f", {shown_s(seconds)} a step"
        yield [
            f"Beside {name} ({_degrees(plan)}{much})",
            "",
            *_against(advised, plan, columns=columns),
        ]
    yield ["Layouts that guides name: model states of a rank", "", _layouts(columns=columns)]
    yield [
        "Best practices and pitfalls, and the lints that look for them",
        "",
        *_practices(columns=columns),
    ]
    yield ["Guides", "", *guide_rows(SOURCES.values(), columns=columns)]


def _head(
    situation: PlanSituation, defaults_taken: tuple[str, ...], *, columns: int
) -> Iterator[str]:
    cluster, sizes = situation.plan.cluster, situation.precision
    text = (
        f"{situation.model.name} ({short_count(situation.num_parameters)} parameters) on "
        f"{situation.num_devices:,} x {cluster.device.name}, {cluster.nodes:,} "
        f"node{'s' * (cluster.nodes > 1)}: {situation.microbatch_sequences} x "
        f"{situation.positions:,} positions a microbatch, {situation.global_sequences:,} sequences "
        f"a step. A weight takes {sizes.total} bytes: parameter {sizes.parameters}, gradient "
        f"{sizes.gradients}, master {sizes.master}, moments {sizes.moments}. Bytes are those of "
        "cost/peak/fullest_rank.py, under 1F1B."
    )
    if defaults_taken:
        text += f" Taken where nothing is said: {'; '.join(defaults_taken)}."
    yield from wrap_text(text, "", "", columns=columns)


def _advice(
    advice: Advice, situation: PlanSituation, seconds: float | None, *, columns: int
) -> Iterator[str]:
    title = advice.tree.title if advice.tree else advice.strategy.name
    yield from wrap_text(f"{advice.id} ({advice.source}): {title}", "", "  ", columns=columns)
    for node, answer in advice.steps:
        yield from wrap_text(
            f"{'yes' if answer.yes else 'no ':<3}  {node.question.text}",
            "  ",
            "       ",
            columns=columns,
        )
        yield from wrap_text(answer.why, "       ", "       ", columns=columns)
    yield from wrap_text(
        f"-> {advice.strategy.name}: {advice.strategy.says()}", "  ", "     ", columns=columns
    )
    much = "" if seconds is None else f", {shown_s(seconds)} a step"
    yield from wrap_text(
        _outcome(advice.outcome, situation) + much, "     ", "     ", columns=columns
    )
    if advice.note:
        yield from wrap_text(f"known corner: {advice.note}", "     ", "     ", columns=columns)
    if advice.tree:
        yield from wrap_text(f"(ours: {advice.tree.ours})", "     ", "     ", columns=columns)


def _outcome(found: StrategyOutcome | None, situation: PlanSituation) -> str:
    if found is None:
        return f"no split of this kind uses all {situation.num_devices:,} devices"
    fits = "fits" if found.fits else "does not fit"
    return f"{_shown(found.split)}: {situation.against(found.held.total)}, {fits}"


def _shown(split: GuideSplit) -> str:
    degrees = asdict(split)
    zero = degrees.pop("zero")
    parts = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return " x ".join(parts or ["one device"]) + (f", ZeRO {zero}" if zero else "")


def _strategy(row: StrategyRow, situation: PlanSituation, *, columns: int) -> Iterator[str]:
    kind = row.kind
    claims = f" [{', '.join(kind.claims)}]" if kind.claims else ""
    yield from wrap_text(
        f"{kind.strategy.name}: cuts {kind.cuts}; {kind.sends}{claims}",
        "  ",
        "      ",
        columns=columns,
    )
    text = _outcome(row.outcome, situation)
    text += "" if row.step_s is None else f", {shown_s(row.step_s)} a step"
    text += f"; {', '.join(row.across_nodes)} over nodes" if row.across_nodes else ""
    yield from wrap_text(text, "      ", "      ", columns=columns)


def _preferences(advised: SituationAdvice, *, columns: int) -> Iterator[str]:
    for preference, answer in advised.preferences:
        head = f"{preference.axis}  {preference.factor:<6}  {'yes' if answer.yes else 'no ':<3}  "
        yield from wrap_text(
            head + f"{preference.question.text} {answer.why}", "  ", " " * 19, columns=columns
        )


def _conflicts(advised: SituationAdvice, *, columns: int) -> Iterator[str]:
    for one, other, where in advised.conflicts:
        yield from wrap_text(f"{one}, {other}: {'; '.join(where)}", "  ", "      ", columns=columns)
    if not advised.conflicts:
        yield "  nowhere: one plan can follow all of them"
    cheapest = next(advice for advice in advised.advice if advice.id == "cheapest")
    yield from wrap_text(
        f"The cheapest communication that fits: {cheapest.strategy.name}. llm-training "
        "starts with ZeRO 3, which sends 3 psi where stages 0 to 2 send 2 psi (llm-training-71); "
        "distributed and scaling start with data parallelism where it fits (between-02).",
        "  ",
        "  ",
        columns=columns,
    )


def _against(advised: SituationAdvice, plan: Plan, *, columns: int) -> Iterator[str]:
    for advice, differs in advised.against(plan):
        yield from wrap_text(
            f"{advice.id}: {'; '.join(differs) or 'agrees'}", "  ", "      ", columns=columns
        )


def _degrees(plan: Plan) -> str:
    mesh = plan.mesh
    degrees = {"pp": mesh.pp, **mesh.data_degrees, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep}
    shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    return f"{shown or 'one rank'}, ZeRO {plan.layout.zero.stage}"


def _layouts(*, columns: int) -> str:
    rows = [
        (
            f"  {one.name}",
            f"{gib(one.states_bytes)} of {gib(one.memory_bytes)} GiB",
            "fits" if one.fits else "does not fit",
            one.source,
        )
        for one in NAMED
    ]
    return table(("", "states", "", "source"), rows, columns=columns)


def _practices(*, columns: int) -> Iterator[str]:
    for practice in PRACTICES:
        lints = ", ".join(practice.lints) or practice.instead
        yield from wrap_text(
            f"{practice.id}: {practice.says} [{lints}]", "  ", "      ", columns=columns
        )
