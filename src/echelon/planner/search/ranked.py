# SPDX-License-Identifier: Apache-2.0
"""A plan of an answer: its choices, what it takes, and the Plan that it becomes.

Closed forms say what a choice takes, events how long its pipeline is, and `config/` makes it a Plan
that every rule has checked, with the bytes of its lists. The best plans by closed forms wait in
line; where the first holds more than a device has, the same plan with more recompute takes a new
place, timed anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeAlias

from echelon.core.axis import SHARD_AXES
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.planner import PLAN_FITS_MEMORY
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import LayoutNumbers, stacked_layouts
from echelon.cost.seconds.from_plan import adapted_model_numbers
from echelon.cost.seconds.stages import PipelineOrder, Stages, balanced_stages, split_layers
from echelon.cost.seconds.step import block_kind_seconds
from echelon.cost.seconds.trainers import OURS
from echelon.cost.seconds.unit_times import Again, UnitTimes, unit_times_by_kind
from echelon.layout.data_groups import ranks_per_node
from echelon.planner.predict.estimate import (
    Estimate,
    estimate_from_inputs,
    estimates_from_inputs,
    with_exact_bytes,
    with_simulated_terms,
)
from echelon.planner.predict.expected import ExpectedStep, expected_step
from echelon.planner.search.candidate import CandidatePlan, ScoredCandidate
from echelon.planner.search.formulas import OF_BLOCKS, searched_sums
from echelon.planner.search.options import RecomputeOption, recompute_options
from echelon.planner.search.pins import NO_RECOMPUTE
from echelon.planner.search.request import SearchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """Hold a plan of an answer: its choices, what it takes, and whether events were timed.

    `stages` are the blocks of each stage, none yet where nobody has asked. What has a `plan` holds
    the bytes of its lists, to the byte; else they are of closed forms.
    """

    candidate: CandidatePlan
    estimate: Estimate
    simulated: bool
    stages: Stages = ()
    plan: Plan | None = None


def cost_inputs_from_candidate(request: SearchRequest, choice: CandidatePlan) -> CostInputs:
    """Return what the formulas read of one plan of a search."""
    length = request.mathematics.sequence_length
    return CostInputs(
        model=adapted_model_numbers(request.model, length, tp=float(choice.mesh.tp)),
        machine=request.machine_numbers(choice.devices),
        software=request.software,
        layout=replace(choice.numbers(), sums=searched_sums(request)),
    )


def estimate_candidate(request: SearchRequest, choice: CandidatePlan) -> Estimate:
    """Return what one plan of a search takes, by closed forms."""
    work = cost_inputs_from_candidate(request, choice)
    return estimate_from_inputs(work, request.mathematics, request.cluster, trainer=request.trainer)


def closed_form_plans(request: SearchRequest, choices: Sequence[CandidatePlan]) -> list[RankedPlan]:
    """Return plans of a search with what they take by closed forms, computed all at once."""
    found: dict[int, Estimate] = {}
    for devices in {choice.devices for choice in choices}:
        places = [place for place, one in enumerate(choices) if one.devices == devices]
        works = [cost_inputs_from_candidate(request, choices[place]) for place in places]
        layout = stacked_layouts([one.layout for one in works])
        length = request.mathematics.sequence_length
        together = replace(
            works[0],
            layout=layout,
            model=adapted_model_numbers(request.model, length, tp=layout.tp),
        )
        estimates = estimates_from_inputs(
            together, works, request.mathematics, request.cluster, trainer=request.trainer
        )
        found |= dict(zip(places, estimates, strict=True))
    return [
        RankedPlan(candidate=one, estimate=found[place], simulated=False)
        for place, one in enumerate(choices)
    ]


def closed_form_plan(request: SearchRequest, choice: CandidatePlan) -> RankedPlan:
    """Return one plan of a search with what it takes by closed forms."""
    estimate = estimate_candidate(request, choice)
    return RankedPlan(candidate=choice, estimate=estimate, simulated=False)


def pipeline_order(choice: CandidatePlan) -> PipelineOrder:
    """Return the order of the actions of a plan of a search."""
    return PipelineOrder(
        schedule=choice.schedule,
        num_ranks=choice.mesh.pp,
        num_stages=choice.mesh.pp * choice.virtual,
        num_microbatches=choice.microbatches,
    )


_known_blocks = lru_cache(maxsize=256)(block_kind_seconds)


def candidate_unit_times(
    request: SearchRequest, choice: CandidatePlan, work: CostInputs
) -> UnitTimes:
    """Return the seconds of each unit of the model under a plan of a search."""
    model, every = request.model, choice.recompute
    again: tuple[Again, Again] = frozenset(choice.operators), "everything"
    kinds: list[tuple[bool, Again]] = [
        (model.layer_has_experts(layer), again[every != NO_RECOMPUTE and layer % every == 0])
        for layer in range(model.layers)
    ]
    layout = LayoutNumbers(**{name: getattr(work.layout, name) for name in OF_BLOCKS})
    return unit_times_by_kind(model, kinds, replace(work, layout=layout), _known_blocks)


def time_by_events(request: SearchRequest, one: RankedPlan) -> RankedPlan:
    """Return a plan of a pipeline that closed forms have timed, timed event by event."""
    times = candidate_unit_times(request, one.candidate, one.estimate.inputs)
    order = pipeline_order(one.candidate)
    stages = balanced_stages(order, times, request.model.layers)
    estimate = with_simulated_terms(one.estimate, order, times, stages)
    return replace(one, estimate=estimate, simulated=True, stages=stages)


def ranking_key(request: SearchRequest, one: RankedPlan) -> tuple[float, ...]:
    """Return where a plan belongs: by its worth, and among equals the simpler one first."""
    mesh = one.candidate.mesh
    value = float(f"{objective_value(request, one.estimate):.4g}")
    return (value, mesh.cp, mesh.tp, mesh.pp, one.candidate.virtual, one.estimate.bytes_held)


def objective_value(request: SearchRequest, estimate: Estimate) -> float:
    """Return what a plan is worth under the objective of a request; less is better."""
    if request.objective == "expected":
        return expected_of_request(request, estimate).total_s
    weighted = request.objective in ("throughput", "cost")
    return estimate.step_s * (estimate.devices if weighted else 1)


def expected_of_request(request: SearchRequest, estimate: Estimate) -> ExpectedStep:
    """Return what a step of a plan is expected to take in a long run.

    Of our own trainer closed forms count what the lists of a plan hold to the byte.
    """
    known = replace(estimate, by_lists=estimate.by_lists or request.trainer == OURS)
    return expected_step(known, request.model, request.memory_bytes)


def settings_from_ranked(request: SearchRequest, ranked: RankedPlan) -> dict[str, object]:
    """Return the settings that give a plan of an answer; an even cut of blocks is said so.

    Where a change has left no node several ranks that share out, secondary slices are left out.
    """
    layers, stages = request.model.layers, ranked.stages
    settings = ranked.candidate.settings(has_experts=request.model.experts is not None)
    if not request.pins.values_of("secondary") and not has_slices_in_nodes(
        request, ranked.candidate
    ):
        settings.pop("zero.secondary", None)
    if stages:
        even = stages == split_layers(layers, len(stages))
        settings["pipeline.stages"] = "even" if even else [list(stage) for stage in stages]
    return settings


def with_checked_plan(request: SearchRequest, one: RankedPlan) -> RankedPlan:
    """Return a plan of an answer with its Plan and the bytes of its lists; ConfigError by a rule.

    These are the bytes that `echelon plan` shows of the same run.
    """
    if not one.stages and one.candidate.mesh.pp > 1:
        times = candidate_unit_times(request, one.candidate, one.estimate.inputs)
        stages = balanced_stages(pipeline_order(one.candidate), times, request.model.layers)
        one = replace(one, stages=stages)
    plan = request.job(settings_from_ranked(request, one)).plan
    estimate = with_exact_bytes(plan, one.estimate, trainer=request.trainer)
    return replace(one, plan=plan, estimate=estimate)


def has_slices_in_nodes(request: SearchRequest, choice: CandidatePlan) -> bool:
    """Return whether nodes hold several of the ranks over which a plan shares out, and none all."""
    mesh, groups = choice.mesh, [choice.mesh.groups(*SHARD_AXES)]
    if request.model.experts is not None:
        groups.append(mesh.expert_shard_groups(expert_tp=choice.expert_tp))
    node = request.cluster.devices_per_node
    return choice.keeps_slices and any(ranks_per_node(found, node) > 1 for found in groups)


PlanKey: TypeAlias = Callable[[SearchRequest, RankedPlan], tuple[Any, ...]]
"""What says where a plan belongs among others: the least comes first."""
MOST_TOO_LARGE = 20
"""Plans in a row that may hold too much before others are looked for."""


@dataclass(slots=True)
class PickedPlans:
    """Hold the plans of an answer, best first, the finalists that are left, and what was refused.

    `too_large` is how many finalists held more than closed forms said, and than a device has.
    """

    ranked: list[RankedPlan] = field(default_factory=list[RankedPlan])
    rest: list[RankedPlan] = field(default_factory=list[RankedPlan])
    refused: Counter[str] = field(default_factory=Counter[str])

    @property
    def too_large(self) -> int:
        """Return how many finalists held too much."""
        return self.refused[PLAN_FITS_MEMORY.id]


def pick_finalists(
    request: SearchRequest,
    scored: Sequence[ScoredCandidate],
    *,
    top: int,
    events: bool = True,
    most: int = MOST_TOO_LARGE,
    key: PlanKey = ranking_key,
) -> PickedPlans:
    """Return the first `top` of the plans that fit, as Plans; `most` others may hold too much.

    The best plan is the first one, where `key` says nothing else.
    """
    picked = PickedPlans()
    closed = closed_form_plans(request, [one.candidate() for one in scored])
    timed = [_by_events(request, one, events=events) for one in closed]
    later = count(len(timed))
    line = [(key(request, one), number, number, one) for number, one in enumerate(timed)]
    heapify(line)
    while line and len(picked.ranked) < top and picked.too_large < most:
        _, number, _, one = heappop(line)
        try:
            found = with_checked_plan(request, one)
        except ConfigError as error:
            picked.refused.update(error.rules)
            continue
        if bytes_to_fit(request, found.estimate) <= request.memory_bytes:
            picked.ranked.append(found)
            continue
        picked.refused[PLAN_FITS_MEMORY.id] += 1
        for leaner in _leaner(request, one.candidate):
            again = timed_plan(request, leaner, events=events)
            heappush(line, (key(request, again), number, next(later), again))
    picked.rest = [one for *_, one in sorted(line, key=lambda item: item[:2])]
    return picked


def bytes_to_fit(request: SearchRequest, estimate: Estimate) -> float:
    """Return what must fit: what is held, with more of what is not counted where that is asked."""
    counted = estimate.bytes_counted
    return counted + request.uncounted_factor * (estimate.bytes_held - counted)


def timed_plan(request: SearchRequest, choice: CandidatePlan, *, events: bool = True) -> RankedPlan:
    """Return one plan of a search with what it takes, a pipeline event by event."""
    return _by_events(request, closed_form_plan(request, choice), events=events)


def _by_events(request: SearchRequest, one: RankedPlan, *, events: bool) -> RankedPlan:
    return time_by_events(request, one) if events and one.candidate.mesh.pp > 1 else one


def _leaner(request: SearchRequest, choice: CandidatePlan) -> Iterator[CandidatePlan]:
    """Yield the same plan with more recompute, and without what nodes keep, where there is that."""
    more = _with_more_recompute(request, choice)
    if more is not None:
        yield more
    if choice.keeps_slices and request.pins.allows("secondary", 0):
        yield replace(choice, secondary=False)


def _with_more_recompute(request: SearchRequest, choice: CandidatePlan) -> CandidatePlan | None:
    """Return the same plan with the next more of it recomputed; None where all is."""
    levels = recompute_options(request)
    now = RecomputeOption(choice.recompute, choice.recomputed_share, choice.operators)
    if now not in levels or now == levels[-1]:
        return None
    every, share, operators = levels[levels.index(now) + 1]
    return replace(choice, recompute=every, recomputed_share=share, operators=operators)
