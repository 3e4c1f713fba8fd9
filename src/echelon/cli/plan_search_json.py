"""The answer of a search as JSON values: `plan_search.schema.json` describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.planner.search import Answer, Ranked

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
        "step_s": estimate.step_s,
        "step_band_s": [estimate.step_band.low, estimate.step_band.high],
        "seconds": dict(estimate.seconds),
        "held_bytes": estimate.bytes_held,
        "held_band_bytes": [estimate.bytes_band.low, estimate.bytes_band.high],
        "bytes": dict(estimate.bytes),
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "mfu": estimate.mfu,
        "price_of_a_million_tokens": None if price is None else estimate.token_price(price),
        "stages": [list(stage) for stage in one.stages],
        "plan": None if one.plan is None else json.loads(one.plan.to_json()),
    }
