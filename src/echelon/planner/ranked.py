"""A plan of an answer: its choices, what it takes, and the Plan that it becomes.

Closed forms say what a choice takes, events how long its pipeline is, and `config/` makes it a Plan
that every rule has checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.plan import Plan
from echelon.cost.balance import split_layers
from echelon.cost.lattice.block import Work
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_model import model_numbers
from echelon.planner.choice import Choice
from echelon.planner.estimate import OURS, Estimate, estimate_work, with_places
from echelon.planner.held import held_by_place
from echelon.planner.held_elsewhere import scales, stage_sizes
from echelon.planner.request import Request
from echelon.planner.simulated import (
    Stages,
    busy_s,
    cut_stages,
    simulated,
    unit_times,
    with_simulated,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Hold a plan of an answer: its choices, what it takes, and whether events were timed.

    `stages` are the blocks of each stage, none yet where nobody has asked. What has a `plan` holds
    the bytes of its lists, to the byte; else they are of closed forms.
    """

    choice: Choice
    estimate: Estimate
    simulated: bool
    stages: Stages = ()
    plan: Plan | None = None


def work_of_choice(request: Request, choice: Choice) -> Work:
    """Return what the formulas read of one plan of a search."""
    length = request.mathematics.sequence_length
    return Work(
        model=model_numbers(request.model, length, tp=float(choice.mesh.tp)),
        machine=machine_numbers(
            request.cluster, request.mathematics.precision.parameters, ranks=choice.devices
        ),
        software=request.software,
        layout=choice.numbers(),
    )


def estimate_choice(request: Request, choice: Choice) -> Estimate:
    """Return what one plan of a search takes, by closed forms."""
    work = work_of_choice(request, choice)
    return estimate_work(work, request.mathematics, request.cluster, trainer=request.trainer)


def by_events(request: Request, one: Ranked) -> Ranked:
    """Return a plan of a pipeline that closed forms have timed, timed event by event."""
    choice, estimate = one.choice, one.estimate
    times = unit_times(choice, estimate.work, request.model)
    stages = cut_stages(choice, times, request.model.layers)
    seconds, busy = simulated(choice, times, stages), busy_s(choice, times)
    estimate = replace(estimate, seconds=with_simulated(estimate.seconds, seconds, busy))
    return replace(one, estimate=estimate, simulated=True, stages=stages)


def place_of(request: Request, one: Ranked) -> tuple[float, ...]:
    """Return where a plan belongs: by its worth, and among equals the simpler one first."""
    mesh = one.choice.mesh
    value = float(f"{worth(request, one.estimate):.4g}")
    return (value, mesh.cp, mesh.tp, mesh.pp, one.choice.virtual, one.estimate.bytes_held)


def worth(request: Request, estimate: Estimate) -> float:
    """Return what a plan is worth under the objective of a request; less is better."""
    weighted = request.objective in ("throughput", "cost")
    return estimate.step_s * (estimate.devices if weighted else 1)


def plan_of(request: Request, ranked: Ranked) -> Plan:
    """Return a plan of an answer as a Plan, checked by every rule."""
    return request.job(settings_of(request, ranked)).plan


def settings_of(request: Request, ranked: Ranked) -> dict[str, object]:
    """Return the settings that give a plan of an answer; an even cut of blocks is said so."""
    layers, stages = request.model.layers, ranked.stages
    settings = ranked.choice.settings(has_experts=request.model.experts is not None)
    if stages:
        even = stages == split_layers(layers, len(stages))
        settings["pipeline.stages"] = "even" if even else [list(stage) for stage in stages]
    return settings


def as_plan(request: Request, one: Ranked) -> Ranked:
    """Return a plan of an answer with its Plan and the bytes of its lists; ConfigError by a rule.

    These are the bytes that `echelon plan` shows of the same run (`held.py`).
    """
    if not one.stages and one.choice.mesh.pp > 1:
        times = unit_times(one.choice, one.estimate.work, request.model)
        one = replace(one, stages=cut_stages(one.choice, times, request.model.layers))
    plan = plan_of(request, one)
    return replace(one, plan=plan, estimate=exact(plan, one.estimate, trainer=request.trainer))


def exact(plan: Plan, estimate: Estimate, *, trainer: str = OURS) -> Estimate:
    """Return an estimate with the bytes of the lists of a Plan; another trainer has its own."""
    if trainer == OURS:
        return with_places(estimate, held_by_place(plan))
    places = held_by_place(plan, stage_sizes(plan, estimate.work))
    times = scales(plan, estimate.work)
    closed = {name: estimate.bytes[name] for name in ("gathered", "buffers")}
    own = [
        {name: size * times.get(name, 1.0) for name, size in terms.items()} | closed
        for terms in places
    ]
    return with_places(estimate, own)
