# SPDX-License-Identifier: Apache-2.0
"""The answer of a search, and why it is the best, as JSON values: see `search.schema.json`.

Every number that is estimated has its band.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.planner.answer.objectives import expected_json, longest_json
from echelon.planner.explain.neighbours import Neighbour, NeighbourOutcome
from echelon.planner.explain.sensitivity import SensitivityResult
from echelon.planner.explain.why import Explanation
from echelon.planner.predict.bands import BandedTerms, price_band
from echelon.planner.predict.estimate import Estimate
from echelon.planner.recommend.recommend import Recommendation, noise
from echelon.planner.report.estimate import band_json, estimate_json, price_with_idle
from echelon.planner.report.printed_numbers import require_agreement
from echelon.planner.search.ranked import RankedPlan, expected_of_request
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import SearchResult

SEARCH_SCHEMA = 1  # of the written JSON


def found_json(
    found: Recommendation | SearchResult, front: Sequence[RankedPlan] = ()
) -> dict[str, Any]:
    """Return all that was found as one object, as `echelon plan --json` prints it."""
    recommended = isinstance(found, Recommendation)
    answer = found.answer if recommended else found
    told: dict[str, Any] = {"schema": SEARCH_SCHEMA, "command": "plan"}
    told["search"] = answer_json(answer, front)
    if recommended:
        told["recommended"] = recommendation_json(found)
    require_agreement(told)
    return told


def answer_json(answer: SearchResult, front: Sequence[RankedPlan] = ()) -> dict[str, Any]:
    """Return an answer as JSON values."""
    request = answer.request
    numbers = request.mathematics
    return {
        "schema": SEARCH_SCHEMA,
        "model": request.model.name,
        "num_parameters": num_parameters(request.model),
        "num_active_parameters": num_active_parameters(request.model),
        "cluster": request.cluster.name,
        "devices": request.cluster.num_devices,
        "memory_bytes": int(request.memory_bytes),
        "global_sequences": numbers.global_sequences,
        "sequence_length": numbers.sequence_length,
        "objective": request.objective,
        "trainer": request.trainer,
        "price_per_device_hour": request.price,
        "pins": dict(request.pins.texts),
        "assumed": list(request.defaults_taken),
        "interrupted": answer.interrupted,
        "seconds": answer.seconds,
        "seen": answer.num_legal,
        "computed": answer.num_computed,
        "refused": dict(answer.refused),
        "plans": [ranked_json(request, one) for one in answer.ranked],
        "front": [ranked_json(request, one) for one in front],
    }


def ranked_json(request: SearchRequest, one: RankedPlan) -> dict[str, Any]:
    """Return a plan of an answer as JSON values: its choices, what it takes, and the Plan."""
    return {
        **choices_json(one),
        **estimate_json(one.estimate),
        **price_json(request, one.estimate),
        "stages": [list(stage) for stage in one.stages],
        "plan": None if one.plan is None else json.loads(one.plan.to_json()),
    }


def choices_json(one: RankedPlan) -> dict[str, Any]:
    """Return every choice of a plan as JSON values."""
    choice = one.candidate
    return {
        "devices": choice.devices,
        "mesh": asdict(choice.mesh),
        "sequence_parallel": choice.sequence_parallel,
        "context": choice.context if choice.mesh.cp > 1 else None,
        "ulysses_degree": choice.ulysses,
        "expert_tp": choice.expert_tp,
        "zero_stage": choice.zero,
        "optimizer_offload": "host" if choice.offload else "none",
        "secondary_slices": choice.keeps_slices,
        "gather": choice.rounding.gather,
        "reduce": choice.rounding.reduce,
        "schedule": choice.schedule,
        "virtual_stages": choice.virtual,
        "microbatch_sequences": choice.microbatch,
        "microbatches": choice.microbatches,
        "recompute_every": choice.recompute or None,
        "recompute_operators": list(choice.operators),
        "timed": "events" if one.simulated else "closed form",
    }


def price_json(request: SearchRequest, estimate: Estimate) -> dict[str, Any]:
    """Return what a million tokens cost as JSON values: nothing where there is no price."""
    if request.price is None:
        return dict.fromkeys(
            ("price_of_a_million_tokens", "price_band", "price_with_idle_devices"), None
        )
    price = price_band(estimate, request.price)
    return {
        "price_of_a_million_tokens": price.value,
        "price_band": band_json(price),
        "price_with_idle_devices": price_with_idle(
            price.value, estimate.devices, request.cluster.num_devices
        ),
    }


def recommendation_json(found: Recommendation) -> dict[str, Any]:
    """Return the plan to run, and which others somebody may prefer, as JSON values."""
    request = found.answer.request
    return {
        **ranked_json(request, found.first.ranked),
        "fits": found.first.fits,
        "sure": found.sure,
        "faster_share": found.faster_share,
        "noise": noise(),
        **_expected(found),
        **({} if found.longest is None else {"longest_sequence": longest_json(found.longest)}),
        **_without_host(found),
        "others": [
            {
                "preferred_for": list(one.preferred_for),
                "fits": one.fits,
                "choice": ranked_json(request, one.ranked),
            }
            for one in found.others
        ],
    }


def _expected(found: Recommendation) -> dict[str, Any]:
    """Return what a step of a long run takes, where that was asked for."""
    request = found.answer.request
    if request.objective != "expected":
        return {}
    return {"expected": expected_json(expected_of_request(request, found.first.ranked.estimate))}


def _without_host(found: Recommendation) -> dict[str, Any]:
    """Reason for optimizer state on the host, if a plan has it there without a pin."""
    without = found.without_host
    if without is None:
        return {}
    least = None if without.leanest is None else without.leanest.estimate.bytes_held
    return {"without_host": {"time_ratio": without.time_ratio, "least_bytes": least}}


WHY_SCHEMA = 1  # of the written JSON


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON values."""
    why = explanation.why
    return {
        "schema": WHY_SCHEMA,
        "step_s": asdict(why.step),
        "held_bytes": asdict(why.held),
        "mfu": asdict(why.mfu),
        "memory_bytes": why.memory_bytes,
        "fullest": why.fullest,
        "binding": [asdict(one) for one in why.binding],
        "work_s": why.work_s,
        "ideal_s": why.ideal_s,
        "exposed": _terms(why.exposed),
        "neighbours": [_neighbour(one) for one in explanation.neighbours],
        "changes": [_change(one) for one in explanation.changes],
        "searched": "near the plan" if why.near else "everything",
    }


def _neighbour(one: Neighbour) -> dict[str, Any]:
    return {
        "change": one.change,
        "pins": dict(one.pins),
        "at_its_best": _outcome(one.at_best),
        "alone": None if one.by_itself is None else _outcome(one.by_itself),
        "obstacle": one.obstacle,
    }


def _outcome(one: NeighbourOutcome) -> dict[str, Any]:
    return {
        "verdict": one.verdict,
        "problems": [problem.to_json() for problem in one.problems],
        "over_bytes": one.over_bytes,
        "rank": one.rank,
        "more_bytes": dict(one.grown),
        "slower_s": None if one.slower_s is None else asdict(one.slower_s),
        "slower_share": one.share,
        "terms": _terms(one.terms),
        "plan": None if one.plan is None else asdict(one.plan.candidate),
    }


def _change(one: SensitivityResult) -> dict[str, Any]:
    return {
        "change": one.name,
        "fits": one.best is not None,
        "gain": one.gain,
        "gain_of_this_plan": one.gain_same,
        "differences": [
            {"name": name, "old": old, "new": new} for name, old, new in one.differences
        ],
        "plan": None if one.best is None else asdict(one.best.candidate),
        "step_s": None if one.best is None else one.best.estimate.step_s,
    }


def _terms(terms: BandedTerms) -> list[dict[str, Any]]:
    return [{"name": name, **asdict(amount)} for name, amount in terms.items()]
