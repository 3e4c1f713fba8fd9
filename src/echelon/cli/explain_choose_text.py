"""`echelon explain choose` as a person reads it: trees, tables, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from echelon.cli.explain_choose import ChooseQuestion
from echelon.cli.explain_context_fits import shown_s
from echelon.cli.output import table
from echelon.cli.wrapped import wrapped
from echelon.core.plan import Plan
from echelon.core.units import short_count
from echelon.planner.guides.agreement import Advice, Advised
from echelon.planner.guides.comparison import Row, compare
from echelon.planner.guides.layouts import NAMED
from echelon.planner.guides.memory import Split
from echelon.planner.guides.practices import PRACTICES
from echelon.planner.guides.situation import GB, Situation
from echelon.planner.guides.strategy import Outcome


def choose_text(question: ChooseQuestion) -> str:
    """Return the page that a person reads."""
    return "\n\n".join("\n".join(part) for part in _parts(question)) + "\n"


def _parts(question: ChooseQuestion) -> Iterator[list[str]]:
    advised = question.advised
    yield list(_head(advised.situation, question.told))
    for advice in advised.advice:
        yield list(_advice(advice, advised.situation, question.seconds(advice)))
    rows = compare(advised.situation, question.software)
    head = "Strategies side by side, on all devices (2 psi: cost/model_states.py)"
    yield [head, "", *(line for row in rows for line in _strategy(row, advised.situation))]
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


def _strategy(row: Row, situation: Situation) -> Iterator[str]:
    kind = row.kind
    claims = f" [{', '.join(kind.claims)}]" if kind.claims else ""
    yield from wrapped(
        f"{kind.strategy.name}: cuts {kind.cuts}; {kind.sends}{claims}", "  ", "      "
    )
    text = _outcome(row.outcome, situation)
    text += "" if row.step_s is None else f", {shown_s(row.step_s)} a step"
    text += f"; {', '.join(row.across_nodes)} over nodes" if row.across_nodes else ""
    yield from wrapped(text, "      ", "      ")


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
