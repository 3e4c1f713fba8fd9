"""`echelon explain choose`: what published guides say of a model and a cluster, and who is right.

Every tree is walked with the reader's own numbers, every row of the size guide that covers them is
checked for fit; then where guides differ from one another, from the run and from the planner. All
of it is data of `planner/guides/`, every number a formula of `cost/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echelon.cli.explain_context_fits import shown_s
from echelon.cli.output import table
from echelon.cli.wrapped import wrapped
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.core.units import short_count
from echelon.cost.lattice.software import Software
from echelon.planner.estimate import estimate_work
from echelon.planner.guides.agreement import Advice, Advised, advise
from echelon.planner.guides.layouts import NAMED
from echelon.planner.guides.memory import Split, work_of_split
from echelon.planner.guides.practices import PRACTICES
from echelon.planner.guides.situation import GB, Situation
from echelon.planner.guides.strategy import Outcome
from echelon.planner.request import LAYOUT_KEYS, LAYOUT_TABLES, Aim, make_request
from echelon.planner.search import search


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseQuestion:
    """Hold the run that was asked about, what guides say of it, and the planner's best plan.

    `told` says what was taken where the run says nothing. `software` is the trainer of which the
    seconds are.
    """

    plan: Plan
    advised: Advised
    best: Plan | None = None
    step_s: float | None = None
    told: tuple[str, ...] = ()
    software: Software = field(default_factory=Software)

    def seconds(self, advice: Advice) -> float | None:
        """Return the seconds of a step of what an advice comes to; None where it does not fit."""
        found = advice.outcome
        if found is None or not found.fits:
            return None
        work = work_of_split(self.plan, found.split, advice.strategy.recompute)
        work = replace(work, software=self.software)
        return estimate_work(work, self.plan.mathematics, self.plan.cluster).step_s

    @property
    def compared(self) -> tuple[tuple[str, Plan], ...]:
        """Return the plans that guides are compared with: the run's own where it is a split."""
        plans = [("this run", self.plan)] if self.plan.mesh.world_size > 1 else []
        return (*plans, *([("the planner", self.best)] if self.best is not None else []))


def ask_choose(run: str | None, settings: Sequence[str]) -> ChooseQuestion:
    """Return the question; ConfigError without a run, or where it is wrong."""
    if run is None:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                "which strategy fits depends on the model and the cluster: name a run",
                set_by="the command line",
                works=("echelon explain choose llama3-8b --set cluster.preset=8xh100",),
            )
        )
    # The planner is free to split the run as it likes: what the run says of that is left aside.
    free = [one for one in settings if not _is_layout(one)]
    request = make_request(run, settings=free, aim=Aim(top=1))
    plan = replace(load_job(run, settings).plan, mathematics=request.mathematics)
    best = search(request).best
    return ChooseQuestion(
        plan=plan,
        advised=advise(Situation(plan)),
        best=best and best.plan,
        step_s=best and best.estimate.step_s,
        told=request.told,
        software=request.software,
    )


def _is_layout(setting: str) -> bool:
    key = setting.partition("=")[0].strip()
    return key.startswith(LAYOUT_TABLES) or key in LAYOUT_KEYS


def choose_json(question: ChooseQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    situation, advised = question.advised.situation, question.advised
    return {
        "model": situation.model.name,
        "num_parameters": situation.num_parameters,
        "cluster": situation.cluster.name,
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
        "conflicts": [asdict(conflict) for conflict in advised.conflicts],
        "compared": [
            {"with": name, "guide": advice.id, "differs": list(differs)}
            for name, plan in question.compared
            for advice, differs in advised.against(plan)
        ],
        "planner": question.best
        and {
            "mesh": asdict(question.best.mesh),
            "zero_stage": question.best.layout.zero.stage,
            "step_s": question.step_s,
        },
        "told": list(question.told),
        "practices": [asdict(practice) for practice in PRACTICES],
        "layouts": [
            {"id": one.id, "name": one.name, "states_bytes": one.states_bytes, "fits": one.fits}
            for one in NAMED
        ],
    }


def choose_text(question: ChooseQuestion) -> str:
    """Return the page that a person reads."""
    return "\n\n".join("\n".join(part) for part in _parts(question)) + "\n"


def _advice_json(advice: Advice) -> dict[str, Any]:
    found = advice.outcome
    return {
        "id": advice.id,
        "source": advice.source,
        "steps": [
            {"node": step.node.id, "question": step.node.question.text, **asdict(step.answer)}
            for step in (advice.path.steps if advice.path else ())
        ],
        "strategy": advice.strategy.name,
        "allows": advice.strategy.says(),
        "split": found and asdict(found.split),
        "held_bytes": found and found.held.total,
        "fits": found and found.fits,
        "note": advice.note,
    }


def _parts(question: ChooseQuestion) -> Iterator[list[str]]:
    advised = question.advised
    yield list(_head(advised.situation, question.told))
    for advice in advised.advice:
        yield list(_advice(advice, advised.situation, question.seconds(advice)))
    yield ["Reasons to raise a degree (003, section 8)", "", *_preferences(advised)]
    yield ["Where guides differ", "", *_conflicts(advised)]
    for name, plan in question.compared:
        seconds = question.step_s if plan is question.best else None
        much = "" if seconds is None else f", {shown_s(seconds)} a step"
        yield [f"Beside {name} ({_degrees(plan)}{much})", "", *_against(advised, plan)]
    yield ["Layouts that guides name: model states of a rank", "", _layouts()]
    yield ["Best practices and pitfalls, and the lints that look for them", "", *_practices()]


def _head(situation: Situation, told: tuple[str, ...]) -> Iterator[str]:
    cluster, sizes = situation.cluster, situation.precision
    text = (
        f"{situation.model.name} ({short_count(situation.num_parameters)} parameters) on "
        f"{situation.num_devices:,} x {cluster.device.name}, {cluster.nodes:,} "
        f"node{'s' * (cluster.nodes > 1)}: {situation.microbatch_sequences} x "
        f"{situation.positions:,} positions a microbatch, {situation.global_sequences:,} sequences "
        f"a step. A weight takes {sizes.total} bytes: parameter {sizes.parameters}, gradient "
        f"{sizes.gradients}, master {sizes.master}, moments {sizes.moments}. Bytes are those of "
        "cost/lattice/memory.py, under 1F1B."
    )
    if told:
        text += f" Taken where nothing is said: {'; '.join(told)}."
    yield from wrapped(text, "", "")


def _advice(advice: Advice, situation: Situation, seconds: float | None) -> Iterator[str]:
    title = advice.path.tree.title if advice.path else advice.strategy.name
    yield f"{advice.id} ({advice.source}): {title}"
    for step in advice.path.steps if advice.path else ():
        yield from wrapped(
            f"{'yes' if step.answer.yes else 'no ':<3}  {step.node.question.text}", "  ", "       "
        )
        yield from wrapped(step.answer.why, "       ", "       ")
    yield from wrapped(f"-> {advice.strategy.name}: {advice.strategy.says()}", "  ", "     ")
    much = "" if seconds is None else f", {shown_s(seconds)} a step"
    yield from wrapped(_outcome(advice.outcome, situation) + much, "     ", "     ")
    if advice.note:
        yield from wrapped(f"known corner: {advice.note}", "     ", "     ")
    if advice.path:
        yield from wrapped(f"(ours: {advice.path.tree.ours})", "     ", "     ")


def _outcome(found: Outcome | None, situation: Situation) -> str:
    if found is None:
        return f"no split of this kind uses all {situation.num_devices:,} devices"
    fits = "fits" if found.fits else "does not fit"
    return f"{_shown(found.split)}: {situation.against(found.held.total)}, {fits}"


def _shown(split: Split) -> str:
    degrees = asdict(split)
    zero = degrees.pop("zero")
    parts = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return " x ".join(parts or ["one device"]) + (f", ZeRO {zero}" if zero else "")


def _preferences(advised: Advised) -> Iterator[str]:
    for preference, answer in advised.preferences:
        head = f"{preference.axis}  {preference.factor:<6}  {'yes' if answer.yes else 'no ':<3}  "
        yield from wrapped(head + f"{preference.question.text} {answer.why}", "  ", " " * 19)


def _conflicts(advised: Advised) -> Iterator[str]:
    for conflict in advised.conflicts:
        yield from wrapped(
            f"{conflict.one}, {conflict.other}: {'; '.join(conflict.where)}", "  ", "      "
        )
    if not advised.conflicts:
        yield "  nowhere: one plan can follow all of them"
    cheapest = next(advice for advice in advised.advice if advice.id == "cheapest")
    yield from wrapped(
        f"The cheapest communication that fits: {cheapest.strategy.name}. Guide 003 starts with "
        "ZeRO 3, which sends 3 psi where stages 0 to 2 send 2 psi (003-71); 002 and 004 start "
        "with data parallelism where it fits (X-02).",
        "  ",
        "  ",
    )


def _against(advised: Advised, plan: Plan) -> Iterator[str]:
    for advice, differs in advised.against(plan):
        yield from wrapped(f"{advice.id}: {'; '.join(differs) or 'agrees'}", "  ", "      ")


def _degrees(plan: Plan) -> str:
    mesh = plan.mesh
    degrees = {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep}
    shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    return f"{shown or 'one rank'}, ZeRO {plan.layout.zero.stage}"


def _layouts() -> str:
    rows = [
        (
            f"  {one.name}",
            f"{one.states_bytes / GB:.1f} GB of {one.memory_bytes / GB:.0f}",
            "fits" if one.fits else "does not fit",
            one.source,
        )
        for one in NAMED
    ]
    return table(("", "states", "", "source"), rows)


def _practices() -> Iterator[str]:
    for practice in PRACTICES:
        lints = ", ".join(practice.lints) or practice.instead
        yield from wrapped(f"{practice.id}: {practice.says} [{lints}]", "  ", "      ")
