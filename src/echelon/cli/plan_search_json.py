"""The answer of a search as JSON values: `plan_search.schema.json` describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from echelon.planner.explain.bands import (
    Banded,
    bytes_of,
    held_of,
    mfu_of,
    price_of,
    step_of,
    terms_of,
    tokens_of,
)
from echelon.planner.explain.grounds import grounds_of

if TYPE_CHECKING:
    from echelon.planner.ranked import Ranked
    from echelon.planner.search import Answer

SEARCH_SCHEMA = 1


def answer_json(answer: Answer, front: Sequence[Ranked] = ()) -> dict[str, Any]:
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
        "assumed": list(request.told),
        "interrupted": answer.interrupted,
        "seconds": answer.seconds,
        "seen": answer.seen,
        "computed": answer.computed,
        "refused": dict(answer.refused),
        "plans": [_ranked_json(answer, one) for one in answer.ranked],
        "front": [_ranked_json(answer, one) for one in front],
    }


def _ranked_json(answer: Answer, one: Ranked) -> dict[str, Any]:
    choice, estimate = one.choice, one.estimate
    price, rests = answer.request.price, grounds_of(estimate.work)
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
        "step_s": estimate.step_s,
        "step_band_s": _band(step_of(estimate)),
        "seconds": dict(estimate.seconds),
        "seconds_bands": {term.name: _band(term.amount) for term in terms_of(estimate)},
        "held_bytes": estimate.bytes_held,
        "held_band_bytes": _band(held_of(estimate)),
        "bytes": dict(estimate.bytes),
        "bytes_bands": {term.name: _band(term.amount) for term in bytes_of(estimate)},
        "bands_rest_on": {"like": rests.like, "beyond": list(rests.beyond)},
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "tokens_band": _band(tokens_of(estimate)),
        "mfu": estimate.mfu,
        "mfu_band": _band(mfu_of(estimate)),
        "price_of_a_million_tokens": None if price is None else estimate.token_price(price),
        "price_band": None if price is None else _band(price_of(estimate, price)),
        "stages": [list(stage) for stage in one.stages],
        "plan": None if one.plan is None else json.loads(one.plan.to_json()),
    }


def _band(amount: Banded) -> list[float]:
    return [amount.low, amount.high]
