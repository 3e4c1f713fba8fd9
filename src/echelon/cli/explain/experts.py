# SPDX-License-Identifier: Apache-2.0
"""`echelon explain experts`: routers, balance, capacity, dispatch and axes, and what a run pays.

Without a run: what there is to choose (`expert_settings.toml`), and facts of shapes that are
presets. With one: its experts on a rank, the rows and bytes of each way to them, what is waited
for, and the way that it would take. All numbers are those of `cost/`, with a balanced load.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

from echelon.cli.explain.context import shown_s
from echelon.cli.flags import bad_argument, plan_if_named
from echelon.config.load import load_job
from echelon.config.rules.experts import two_hop_obstacle
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.cost.bytes.expert_memory import balanced_memory, worst_memory
from echelon.cost.bytes.expert_sent import dispatch_bytes
from echelon.cost.bytes.terms import all_to_all_bytes
from echelon.cost.seconds.block import dispatch_seconds
from echelon.cost.seconds.kernels import model_flops_per_token
from echelon.layout.expert_load import (
    balanced_pairs,
    balanced_rows,
    dispatched_tokens,
    kept_assignments,
    most_nodes,
    num_nodes,
)
from echelon.layout.stage import RankPart, StagePart
from echelon.planner.report.head import expert_facts, experts_json, fact_lines
from echelon.planner.view.text_layout import WIDTH, flow_text, table, wrap_text


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchKindCost:
    """Hold what one way to the experts sends in a block and microbatch, and how long it takes."""

    name: str
    asked: bool
    sent_forward_bytes: int
    sent_backward_bytes: int
    transfer_s: float | None
    exposed_s: float | None
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertQuestion:
    """Hold the run that was asked about, each way to its experts, and why others cannot be."""

    plan: Plan
    dispatch_costs: tuple[DispatchKindCost, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def recommended(self) -> DispatchKindCost | None:
        """Return the way that is exposed least, of those alike the first; by bytes if unknown.

        A padded way is for static shapes: it is not taken for its speed.
        """
        ways = [way for way in self.dispatch_costs if way.name != "padded"]
        if any(way.exposed_s is None for way in ways):
            return min(
                ways, key=lambda way: way.sent_forward_bytes + way.sent_backward_bytes, default=None
            )
        return min(ways, key=lambda way: way.exposed_s or 0.0, default=None)


def ask_experts(run: str | None = None, settings: Sequence[str] = ()) -> ExpertQuestion | None:
    """Return the question; None where no run is asked about.

    Raises ConfigError where the run itself is wrong, or has no experts.
    """
    plan = plan_if_named(run, settings, "experts mixtral-8x7b")
    if plan is None:
        return None
    if plan.model.experts is None:
        raise bad_argument(
            f"{run} has no experts: {plan.model.name} is dense",
            "echelon explain experts mixtral-8x7b",
        )
    ways, refused = _dispatch_costs(plan)
    return ExpertQuestion(plan=plan, dispatch_costs=tuple(ways), refused=tuple(refused))


def experts_page_json(question: ExpertQuestion | None) -> dict[str, Any]:
    """Return the page as JSON values."""
    found = expert_settings_json()
    if question is None:
        return found
    plan, taken = question.plan, question.recommended
    active, every = _flops_per_token(plan)
    return found | {
        "experts": experts_json(plan),
        "rows": dict(_rows(plan)),
        "dispatch_of_run": [asdict(way) for way in question.dispatch_costs],
        "refused": [{"name": name, "why": why} for name, why in question.refused],
        "taken": taken and taken.name,
        "memory_bytes": {name: held for name, _, held in _memory(plan)},
        "flops_per_token": {"active": active, "all_experts": every},
    }


def experts_page_text(question: ExpertQuestion | None, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    return (
        expert_settings_text(columns=columns)
        if question is None
        else "\n\n".join(_parts(question, columns=columns)) + "\n"
    )


def _parts(question: ExpertQuestion, *, columns: int) -> Iterator[str]:
    plan = question.plan
    yield f"{plan.model.name}\n" + "\n".join(fact_lines(expert_facts(plan)))
    rows = _rows(plan)
    width = max(len(name) for name, _ in rows)
    yield "Rows of one block and microbatch on a rank, balanced\n\n" + "\n".join(
        f"  {name:<{width}}  {count:>12,}" for name, count in rows
    )
    if question.dispatch_costs:
        yield "Kinds of dispatch, for the same rows\n\n" + _table(question, columns=columns)
        yield "transfer: at the rates that links reach; exposed: what no work of the block hides"
    else:
        yield "No row is sent: mesh.ep = 1, and every rank has all experts."
    if question.refused:
        yield "\n".join(f"{name} cannot be here: {why}" for name, why in question.refused)
    if question.recommended is not None:
        yield f"Which to take\n\n  {_why(question, question.recommended)}"
    yield "For one block and microbatch a rank holds\n\n" + table(
        ("", "formula", "bytes"),
        [(name, formula, binary_bytes(held)) for name, formula, held in _memory(plan)],
        columns=columns,
    )
    active, every = _flops_per_token(plan)
    yield f"A token costs {active:.3g} FLOPs; did it meet all experts, {every:.3g}"


def _flops_per_token(plan: Plan) -> tuple[float, float]:
    """Return the FLOPs of a token with the experts that it meets, and with all of them."""
    model, length = plan.model, plan.mathematics.sequence_length
    every = model_flops_per_token(model, length, all_experts=True)
    return model_flops_per_token(model, length), every


def _rows(plan: Plan) -> list[tuple[str, int]]:
    """Return the names and numbers of rows, in the letters of `layout/expert_load.py`."""
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


def _dispatch_costs(plan: Plan) -> tuple[list[DispatchKindCost], list[tuple[str, str]]]:
    """Return the ways that this run could take to its experts, and why not the others."""
    layout, refused = plan.layout.experts, list[tuple[str, str]]()
    if plan.mesh.ep == 1:
        return [], refused
    kinds = {
        "flat": replace(layout, dispatch="flat", padded=False),
        "two-hop": replace(layout, dispatch="two-hop", padded=False),
        "padded": replace(layout, dispatch="flat", padded=True),
    }
    why = two_hop_obstacle(plan.mesh, layout.expert_tp, plan.cluster.devices_per_node)
    if why:
        refused.append(("two-hop", why))
    if plan.mathematics.balance.capacity_factor is None:
        refused.append(("padded", "without experts.capacity_factor there is no size to pad to"))
    allowed = kinds.keys() - dict(refused)
    return [_dispatch_cost(plan, name, kinds[name]) for name in kinds if name in allowed], refused


def _dispatch_cost(plan: Plan, name: str, layout: ExpertLayout) -> DispatchKindCost:
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
    return DispatchKindCost(
        name=name,
        asked=layout == plan.layout.experts,
        sent_forward_bytes=sum(term.each for term in terms) - backward,
        sent_backward_bytes=backward,
        transfer_s=None if seconds is None else seconds.transfer_s,
        exposed_s=None if seconds is None else seconds.exposed_s,
        held_bytes=balanced_memory(other).in_dispatch.bytes,
    )


def _table(question: ExpertQuestion, *, columns: int) -> str:
    rows = [
        (
            way.name + (" (this run)" if way.asked else ""),
            decimal_bytes(way.sent_forward_bytes),
            decimal_bytes(way.sent_backward_bytes),
            "-" if way.transfer_s is None else shown_s(way.transfer_s),
            "-" if way.exposed_s is None else shown_s(way.exposed_s),
            binary_bytes(way.held_bytes),
        )
        for way in question.dispatch_costs
    ]
    return table(
        ("dispatch", "sent forward", "backward", "transfer", "exposed", "held"),
        rows,
        columns=columns,
    )


def _why(question: ExpertQuestion, taken: DispatchKindCost) -> str:
    """Return why a kind of dispatch is taken, with its numbers."""
    others = (way for way in question.dispatch_costs if way.name not in (taken.name, "padded"))
    other = next(others, None)
    if other is None:
        return f"{taken.name}: tokens have no second hop here"
    if taken.exposed_s is None or other.exposed_s is None:
        return f"{taken.name}: it sends less; the links of this cluster are not known"
    waits = f"{shown_s(taken.exposed_s)} are exposed for a block and microbatch"
    return f"{taken.name}: {waits}, {shown_s(other.exposed_s)} with {other.name}"


def _memory(plan: Plan) -> Iterator[tuple[str, str, int]]:
    for name, memory in (("balanced", balanced_memory(plan)), ("worst", worst_memory(plan))):
        for term in (memory.kept, memory.in_dispatch):
            yield f"{term.name}, {name}", term.formula, term.bytes


def _experts(plan: Plan) -> Experts:
    assert plan.model.experts is not None, "ask_experts refuses a dense model"
    return plan.model.experts


PUBLISHED = "deepseek-v3"
NODES = 8  # nodes
TOKENS = 4096  # tokens of a rank
HIDDEN = 7168  # width
TOP_K = 8  # experts of a token
RANKS = 8  # expert ranks of a node
BF16 = 2  # bytes
FACTOR = 1.25  # capacity factor


def expert_settings() -> dict[str, list[dict[str, str]]]:
    """Return the settings by what they are about: what each takes and means, and its source."""
    text = (files("echelon.cli.explain") / "expert_settings.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def expert_settings_json() -> dict[str, Any]:
    """Return the settings and the facts as JSON values."""
    shape = load_job(PUBLISHED).plan.model
    experts = shape.experts
    assert experts is not None
    elements = 2 * TOKENS * HIDDEN * TOP_K
    return {
        "settings": expert_settings(),
        "facts": {
            "elements": elements,
            "sent_forward_bytes": all_to_all_bytes(elements * BF16, RANKS),
            "num_parameters": num_parameters(shape),
            "num_active_parameters": num_active_parameters(shape),
            "most_nodes": most_nodes(experts, NODES),
            "room": Balance(capacity_factor=FACTOR).capacity(
                TOKENS, experts.num_experts, experts.top_k
            ),
        },
    }


def expert_settings_text(*, columns: int) -> str:
    """Return the page without a run."""
    parts = [
        "Mixtures of experts: a router gives each token k of E experts. Expert parallelism shares "
        "out the experts of a block among ep ranks, and tokens travel to them: no ranks are "
        "added, for ep is folded over ranks that there are.",
        *(
            f"{title}\n\n" + "\n".join(_lines(rows, columns=columns))
            for title, rows in expert_settings().items()
        ),
        "Some numbers\n\n" + flow_text(_facts(), indent="  ", columns=columns),
        "For your own run: echelon explain experts RUN --set mesh.ep=4",
    ]
    return "\n\n".join(parts) + "\n"


def _lines(choices: Sequence[Mapping[str, str]], *, columns: int) -> Iterator[str]:
    for one in choices:
        yield f"  {one['setting']}"
        text = f"{one['means']}. Source: {one['source']}"
        yield from wrap_text(text, "      ", "      ", columns=columns)


def _facts() -> Iterator[str]:
    facts = expert_settings_json()["facts"]
    each, active, whole = (
        facts[name] for name in ("sent_forward_bytes", "num_active_parameters", "num_parameters")
    )
    yield f"  {TOKENS} tokens of width {HIDDEN}, k = {TOP_K}, balanced over {RANKS} ranks: there"
    yield f"  and back 2 N k D = {facts['elements']:,} elements, in bf16 twice as many bytes, of"
    yield f"  which {RANKS - 1}/{RANKS} leave: {each:,} bytes = {decimal_bytes(each)} forward."
    yield "  Two all-to-alls forward, two backward of the same rows: backward sends as much again."
    yield f"  DeepSeek-V3: a token meets {short_count(active)} of {short_count(whole)} parameters."
    most = facts["most_nodes"]
    yield f"  It was trained with ep = 64 over {NODES} nodes, a token on {most} of them at most,"
    yield "  pp = 16, ZeRO stage 1 and no tensor parallelism (its report, 2024, 2.1.2 and 3.2)."
    yield f"  With a capacity factor of {FACTOR}, which it does not have, one of its experts"
    yield f"  would have room for ceil({FACTOR} x {TOKENS} x 8 / 256) = {facts['room']} tokens of a"
    yield f"  sequence of {TOKENS}."
