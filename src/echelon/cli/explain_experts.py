"""`echelon explain experts`: routers, balance, capacity, dispatch and axes, and what a run pays.

Without a run: what there is to choose. With one: its experts on a rank, the rows and bytes of each
way to them, what is waited for, and the way that it would take. All numbers are those of `cost/`,
with a balanced load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.cli.explain_context_fits import shown_s
from echelon.cli.explain_experts_ways import ways_json, ways_text
from echelon.cli.output import table
from echelon.cli.plan_experts import expert_lines, experts_json
from echelon.config.expert_travel import why_not_two_hop
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.experts import ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.cost.expert_dispatch import dispatch_bytes
from echelon.cost.expert_load import (
    balanced_pairs,
    balanced_rows,
    dispatched_tokens,
    kept_assignments,
    most_nodes,
    num_nodes,
)
from echelon.cost.expert_memory import balanced_memory, worst_memory
from echelon.cost.expert_times import dispatch_seconds
from echelon.cost.flops import model_flops_per_token
from echelon.cost.stage import RankPart, StagePart
from echelon.cost.unit_times import expert_waits_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Hold what one way to the experts sends in a block and microbatch, and how long it takes."""

    name: str
    asked: bool
    forward_bytes: int
    backward_bytes: int
    travels_s: float | None
    waits_s: float | None
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertQuestion:
    """Hold the run that was asked about, each way to its experts, and why others cannot be."""

    plan: Plan
    ways: tuple[Way, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def taken(self) -> Way | None:
        """Return the way that is waited for least, of those alike the first; by bytes if unknown.

        A padded way is for static shapes: it is not taken for its speed.
        """
        ways = [way for way in self.ways if way.name != "padded"]
        if any(way.waits_s is None for way in ways):
            return min(ways, key=lambda way: way.forward_bytes + way.backward_bytes, default=None)
        return min(ways, key=lambda way: way.waits_s or 0.0, default=None)


def ask_experts(run: str | None, settings: Sequence[str]) -> ExpertQuestion | None:
    """Return the question; None where no run is asked about.

    Raises ConfigError where the run itself is wrong, or has no experts.
    """
    if run is None:
        if settings:
            raise _wrong(
                "--set has an effect where a run is named",
                f"echelon explain experts mixtral-8x7b --set {' --set '.join(settings)}",
            )
        return None
    plan = load_job(run, settings).plan
    if plan.model.experts is None:
        raise _wrong(
            f"{run} has no experts: {plan.model.name} is dense",
            "echelon explain experts mixtral-8x7b",
        )
    ways, refused = _ways(plan)
    return ExpertQuestion(plan=plan, ways=tuple(ways), refused=tuple(refused))


def experts_page_json(question: ExpertQuestion | None) -> dict[str, Any]:
    """Return the page as JSON values."""
    found = ways_json()
    if question is None:
        return found
    plan, taken = question.plan, question.taken
    length = plan.mathematics.sequence_length
    return found | {
        "experts": experts_json(plan),
        "rows": dict(_rows(plan)),
        "ways_of_run": [
            {
                "name": way.name,
                "asked": way.asked,
                "sent_forward_bytes": way.forward_bytes,
                "sent_backward_bytes": way.backward_bytes,
                "travels_s": way.travels_s,
                "waits_s": way.waits_s,
                "held_bytes": way.held_bytes,
            }
            for way in question.ways
        ],
        "refused": [{"name": name, "why": why} for name, why in question.refused],
        "taken": taken and taken.name,
        "memory_bytes": {name: held for name, _, held in _memory(plan)},
        "flops_per_token": {
            "active": model_flops_per_token(plan.model, length),
            "all_experts": model_flops_per_token(plan.model, length, all_experts=True),
        },
    }


def experts_page_text(question: ExpertQuestion | None) -> str:
    """Return the page that a person reads."""
    return ways_text() if question is None else "\n\n".join(_parts(question)) + "\n"


def _parts(question: ExpertQuestion) -> Iterator[str]:
    plan = question.plan
    yield f"{plan.model.name}\n" + "\n".join(expert_lines(plan))
    rows = _rows(plan)
    width = max(len(name) for name, _ in rows)
    yield "Rows of one block and microbatch on a rank, balanced\n\n" + "\n".join(
        f"  {name:<{width}}  {count:>12,}" for name, count in rows
    )
    if question.ways:
        yield "Ways to the experts, for the same rows\n\n" + _table(question)
        yield "travels: at the peaks of links; waits: what no other work of the block hides"
    else:
        yield "No row travels: mesh.ep = 1, and every rank has all experts."
    if question.refused:
        yield "\n".join(f"{name} cannot be here: {why}" for name, why in question.refused)
    if question.taken is not None:
        yield f"Which to take\n\n  {_why(question, question.taken)}"
    yield "For one block and microbatch a rank holds\n\n" + table(
        ("", "formula", "bytes"),
        [(name, formula, binary_bytes(held)) for name, formula, held in _memory(plan)],
    )
    length = plan.mathematics.sequence_length
    active = model_flops_per_token(plan.model, length)
    every = model_flops_per_token(plan.model, length, all_experts=True)
    yield f"A token costs {active:.3g} FLOPs; did it meet all experts, {every:.3g}"


def _rows(plan: Plan) -> list[tuple[str, int]]:
    """Return the names and numbers of rows, in the letters of `cost/expert_load.py`."""
    experts = _experts(plan)
    numbers = plan.mathematics
    found = [
        ("N tokens", plan.local_tokens),
        ("m dispatched by this rank", dispatched_tokens(plan)),
        ("m k assignments that have room", kept_assignments(plan)),
    ]
    room = numbers.balance.capacity(numbers.sequence_length, experts.num_experts, experts.top_k)
    if room is not None:
        found.append(("room of an expert in a sequence", room))
    if plan.mesh.ep > 1:
        found.append(("S = (n-1)/n m k that leave it", balanced_rows(plan, plan.mesh.ep).leaving))
        nodes = num_nodes(plan)
        if nodes > 1:
            found += [
                ("of them to other nodes, flat", balanced_rows(plan, nodes).leaving),
                ("to other nodes in two hops", balanced_pairs(plan, nodes).leaving),
                ("nodes of a token, at most", most_nodes(experts, nodes)),
            ]
    return found


def _ways(plan: Plan) -> tuple[list[Way], list[tuple[str, str]]]:
    """Return the ways that this run could take to its experts, and why not the others."""
    layout, refused = plan.layout.experts, list[tuple[str, str]]()
    if plan.mesh.ep == 1:
        return [], refused
    kinds = {
        "flat": replace(layout, dispatch="flat", padded=False),
        "two-hop": replace(layout, dispatch="two-hop", padded=False),
        "padded": replace(layout, dispatch="flat", padded=True),
    }
    why = why_not_two_hop(plan.mesh, layout.expert_tp, plan.cluster.devices_per_node)
    if why:
        refused.append(("two-hop", why))
    if plan.mathematics.balance.capacity_factor is None:
        refused.append(("padded", "without experts.capacity_factor there is no size to pad to"))
    names = [name for name in kinds if name not in dict(refused)]
    return [_way(plan, name, kinds[name]) for name in names], refused


def _way(plan: Plan, name: str, layout: ExpertLayout) -> Way:
    other = replace(plan, layout=replace(plan.layout, experts=layout))
    layer = _experts(plan).first_dense_layers
    one = StagePart(stage=0, blocks=(layer,), first=False, last=False, microbatches=1)
    terms = [
        term
        for term in dispatch_bytes(other, RankPart(pp_rank=0, stages=(one,), mirrored=False), None)
        if not term.name.endswith("again")
    ]
    backward = sum(term.each for term in terms if term.name.endswith("backward"))
    seconds = dispatch_seconds(other)
    travels = None
    if seconds is not None:
        both = (seconds.forward, seconds.backward)
        travels = sum(motion.there_s + motion.back_s for motion in both)
    return Way(
        name=name,
        asked=layout == plan.layout.experts,
        forward_bytes=sum(term.each for term in terms) - backward,
        backward_bytes=backward,
        travels_s=travels,
        waits_s=None if travels is None else sum(expert_waits_s(other)),
        held_bytes=balanced_memory(other).travelling.bytes,
    )


def _table(question: ExpertQuestion) -> str:
    rows = [
        (
            way.name + (" (this run)" if way.asked else ""),
            decimal_bytes(way.forward_bytes),
            decimal_bytes(way.backward_bytes),
            "-" if way.travels_s is None else shown_s(way.travels_s),
            "-" if way.waits_s is None else shown_s(way.waits_s),
            binary_bytes(way.held_bytes),
        )
        for way in question.ways
    ]
    return table(("way", "sent forward", "backward", "travels", "waits", "held"), rows)


def _why(question: ExpertQuestion, taken: Way) -> str:
    """Return why a way is taken, with its numbers."""
    others = [way for way in question.ways if way.name not in (taken.name, "padded")]
    if not others:
        return f"{taken.name}: tokens have no second hop here"
    other = others[0]
    if taken.waits_s is None or other.waits_s is None:
        return f"{taken.name}: it sends less; the links of this cluster are not known"
    waits = f"{shown_s(taken.waits_s)} are waited for a block and microbatch"
    return f"{taken.name}: {waits}, {shown_s(other.waits_s)} with {other.name}"


def _memory(plan: Plan) -> Iterator[tuple[str, str, int]]:
    for name, memory in (("balanced", balanced_memory(plan)), ("worst", worst_memory(plan))):
        for term in (memory.kept, memory.travelling):
            yield f"{term.name}, {name}", term.formula, term.bytes


def _experts(plan: Plan) -> Experts:
    assert plan.model.experts is not None, "ask_experts refuses a dense model"
    return plan.model.experts


def _wrong(message: str, works: str) -> ConfigError:
    return ConfigError(BAD_ARGUMENT.problem(message, set_by="the command line", works=(works,)))
