"""What ranks record of bytes in one step: sent over axes, held by term, kept by activations.

What of a step is data goes with it: tokens, routes, and which pieces of queries and keys a context
rank gives to its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activations.attention_working import first_keys, row_chunks
from echelon.cost.activations.timeline import StepData
from echelon.launch.context import RankContext
from echelon.layout.attention_tiles import tiles_between
from echelon.layout.expert_load import expert_load_from_routing
from echelon.layout.stage import plan_of_layer
from echelon.parallel.rank_model import RankModel
from echelon.parallel.recompute import RecomputingRunner
from echelon.proof.claims.checks import dp_rank_of
from echelon.proof.oracle.batches import global_batch
from echelon.proof.ranks import find_factory
from echelon.proof.subject import ProofBatch, ReportedRouting
from tests.walks.plans.activation_meter import ActionMemory, ActivationMeter

MEASURED_STEP = 1
"""The first step makes what stays; the second one is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Hold what one rank recorded in a step; `stored_bytes` of inputs were on the host at most."""

    sent: Mapping[str, int]
    held: Mapping[str, int]
    skipped: bool
    actions: tuple[ActionMemory, ...]
    stored_bytes: int
    routing: ReportedRouting | None


def record_rank(context: RankContext, argument: Mapping[str, Any]) -> RankBytes:
    """Take two steps of `argument["plan"]` (JSON) on a rank; the target that the ranks run."""
    plan = Plan.from_json(argument["plan"])
    subject: Any = find_factory(argument["subject"])(context, plan)
    try:
        model: RankModel = subject.engine.model
        subject.step(global_batch(plan, 0), 0)
        runners = [stage.run_block for stage in model.stages.values()]
        hosts = [one.host for one in runners if isinstance(one, RecomputingRunner) and one.host]
        for host in hosts:
            host.peak_stored_bytes = 0
        with ActivationMeter(model).watching() as meter:
            report = subject.step(global_batch(plan, MEASURED_STEP), MEASURED_STEP)
        return RankBytes(
            sent=dict(report.bytes_sent),
            held=dict(report.bytes_held),
            skipped=bool(report.skipped),
            actions=tuple(meter.actions),
            stored_bytes=sum(host.peak_stored_bytes for host in hosts),
            routing=ReportedRouting.from_report(report.routing),
        )
    finally:
        subject.close()


def step_data(plan: Plan, rank: int, recorded: Sequence[RankBytes]) -> StepData:
    """Return what of the measured step is data: the routing of the ranks, documents."""
    batch = global_batch(plan, MEASURED_STEP)
    load = None
    if plan.model.experts is not None:
        load = expert_load_from_routing(plan, rank, _chosen(plan, batch, recorded))
    kinds = [
        (one, first) for one in range(plan.num_microbatches) for first in plan.model.first_of_kinds
    ]
    cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
    return StepData(
        load=load,
        transposed={
            (one, first): _transposed(plan_of_layer(plan, first), rank, batch, one)
            for one, first in kinds
        },
        row_chunks={
            (one, first): row_chunks(
                plan_of_layer(plan, first), cp_rank, _microbatch(plan, rank, batch, one).documents
            )
            for one, first in kinds
        },
    )


def _chosen(
    plan: Plan, batch: ProofBatch, recorded: Sequence[RankBytes]
) -> dict[int, NDArray[np.int64]]:
    """Return the experts of each token [sequences, positions, k] by layer, as the ranks say."""
    experts = plan.model.experts
    assert experts is not None, "a dense model routes nothing"
    length = plan.mathematics.sequence_length
    sequence_of = {sample: place for place, sample in enumerate(batch.sample_ids)}
    shape = (len(batch.sample_ids), length, experts.top_k)
    layers = filter(plan.model.layer_has_experts, range(plan.model.layers))
    chosen = {layer: np.full(shape, -1, dtype=np.int64) for layer in layers}
    for one in recorded:
        for route in one.routing.routes if one.routing is not None else ():
            rows_NK = np.where(route.kept, route.chosen, -1)
            for token, row_K in zip(route.tokens, rows_NK, strict=True):
                sample, position = divmod(token, length)
                chosen[route.layer][sequence_of[sample], position] = row_K
    return chosen


def _microbatch(plan: Plan, rank: int, batch: ProofBatch, microbatch: int) -> ProofBatch:
    return batch.microbatch(plan, dp_rank_of(plan, rank), microbatch)


def _transposed(plan: Plan, rank: int, batch: ProofBatch, microbatch: int) -> int:
    """Return whether the output of attention is copied into the order of positions.

    The plain kernel (soft caps) gives it head by head; only where it is merged from pieces of which
    the first has not all rows is it added up in the order of positions.
    """
    heads = plan.model.heads // plan.mesh.tp // plan.layout.context.ulysses_degree
    if plan.model.soft_cap is None or heads * plan.layout.microbatch_sequences == 1:
        return 0
    place = plan.placement.ring_place(plan.mesh.coordinates(rank)[Axis.CP])
    queries = plan.placement.ring_runs(place)
    documents = _microbatch(plan, rank, batch, microbatch).documents
    pieces = tiles_between(queries, first_keys(plan, place), plan.model.mask, documents)
    rows = slice(0, sum(run.count for run in queries))
    return int(pieces[0].sequence is None and pieces[0].q == rows)
