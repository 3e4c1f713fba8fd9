"""The answer of a search, and why it is the best, as JSON values: see `search.schema.json`.

Every number that is estimated has its band.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echelon.cli.plan.estimate import band_json, estimate_json
from echelon.cli.plan.expected_text import expected_json
from echelon.planner.explain.bands import BandedTerms, price_band
from echelon.planner.explain.neighbours import Neighbour, NeighbourOutcome
from echelon.planner.explain.sensitivity import SensitivityResult
from echelon.planner.explain.why import Explanation
from echelon.planner.recommend.recommend import Recommendation, noise
from echelon.planner.search.ranked import RankedPlan, expected_of_request
from echelon.planner.search.search import SearchResult

SEARCH_SCHEMA = 1  # of the written JSON


def answer_json(answer: SearchResult, front: Sequence[RankedPlan] = ()) -> dict[str, Any]:
    """Return an answer as JSON values."""
    request = answer.request
    numbers = request.mathematics
    return {
        "schema": SEARCH_SCHEMA,
        "model": request.model.name,
        "cluster": request.cluster.name,
        "devices": request.cluster.num_devices,
        "memory_bytes": int(request.memory_bytes),
        "global_sequences": numbers.global_sequences,
        "sequence_length": numbers.sequence_length,
        "objective": request.objective,
        "trainer": request.trainer,
        "pins": dict(request.pins.texts),
        "assumed": list(request.defaults_taken),
        "interrupted": answer.interrupted,
        "seconds": answer.seconds,
        "seen": answer.num_legal,
        "computed": answer.num_computed,
        "refused": dict(answer.refused),
        "plans": [_ranked_json(answer, one) for one in answer.ranked],
        "front": [_ranked_json(answer, one) for one in front],
    }


def _ranked_json(answer: SearchResult, one: RankedPlan) -> dict[str, Any]:
    choice, estimate = one.candidate, one.estimate
    price = answer.request.price
    return {
        "devices": choice.devices,
        "mesh": asdict(choice.mesh),
        "sequence_parallel": choice.sequence_parallel,
        "context": choice.context if choice.mesh.cp > 1 else None,
        "ulysses_degree": choice.ulysses,
        "expert_tp": choice.expert_tp,
        "zero_stage": choice.zero,
        "optimizer_offload": "host" if choice.offload else "none",
        "schedule": choice.schedule,
        "virtual_stages": choice.virtual,
        "microbatch_sequences": choice.microbatch,
        "microbatches": choice.microbatches,
        "recompute_every": choice.recompute or None,
        "timed": "events" if one.simulated else "closed form",
        **estimate_json(estimate),
        "price_of_a_million_tokens": None if price is None else estimate.token_price(price),
        "price_band": None if price is None else band_json(price_band(estimate, price)),
        "stages": [list(stage) for stage in one.stages],
        "plan": None if one.plan is None else json.loads(one.plan.to_json()),
    }


def recommendation_json(found: Recommendation) -> dict[str, Any]:
    """Return which plan to run and which others somebody may prefer, as JSON values."""
    return {
        "fits": found.first.fits,
        "sure": found.sure,
        "faster_share": found.faster_share,
        "noise": noise(),
        **_expected(found),
        "others": [
            {
                "preferred_for": list(one.preferred_for),
                "fits": one.fits,
                "choice": _ranked_json(found.answer, one.ranked),
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
