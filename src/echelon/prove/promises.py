"""What a plan promised beside its mathematics: bytes sent, bytes held, the order of actions."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.buckets import BucketPlan, plan_buckets, shard_degree, slice_elements, zero_stage
from echelon.cost.bytes_held import bytes_held as planned_bytes_held
from echelon.cost.bytes_sent import bytes_sent as planned_bytes_sent
from echelon.cost.collectives import all_gather_bytes
from echelon.cost.data_bytes import EXPERT_SHARD_AXIS, STAGE_AXIS
from echelon.cost.expert_load import ExpertLoad, load_of
from echelon.cost.experts import ROUTING_TERM
from echelon.cost.stage import part_of
from echelon.prove.checks import Check, Evidence
from echelon.prove.oracle import OracleStep
from echelon.schedule.of_plan import schedule_of


def bytes_sent(evidence: Evidence) -> Iterator[Check]:
    """Compare the bytes that each rank sent over each axis, in each step, with `cost/`.

    What goes to experts is that of the oracle's routing, whatever the ranks say of theirs.
    """
    plan = evidence.plan
    for oracle in evidence.oracle:
        for rank, report in enumerate(evidence.observed.reports(oracle.step)):
            if report.bytes_sent is None:
                continue
            load = _load(plan, rank, oracle)
            wanted = bytes_by_axis(plan, rank, skipped=oracle.skipped, load=load)
            for axis in sorted({*wanted, *report.bytes_sent}):
                predicted, sent = wanted.get(axis, 0), report.bytes_sent.get(axis, 0)
                yield Check(
                    step=oracle.step,
                    subject=f"bytes of rank {rank} over {axis}",
                    error=abs(sent - predicted) / max(predicted, 1),
                    allowed=0.0,
                    detail=f"{sent} sent, {predicted} by the formulas",
                    position=rank,
                )


def bytes_by_axis(
    plan: Plan, rank: int, *, skipped: bool, load: ExpertLoad | None = None
) -> dict[str, int]:
    """Return the bytes that `rank` is to send over each axis in a step.

    A step that is skipped updates nothing: Muon sends no matrices, and parameters that are kept
    whole are not gathered. `load` is how the rank's expert group was routed.
    """
    total: dict[str, int] = {}
    for term in planned_bytes_sent(plan, rank, load):
        of_update = term.axis == STAGE_AXIS and term.name != ROUTING_TERM
        if not (skipped and of_update):
            total[term.axis] = total.get(term.axis, 0) + term.bytes
    if skipped:
        for bucket in plan_buckets(plan, part_of(plan, rank)):
            axis = EXPERT_SHARD_AXIS if bucket.expert else Axis.DP_SHARD.value
            if gathered := _gathered_after_update(plan, bucket):
                total[axis] = total.get(axis, 0) - gathered
    return total


def _gathered_after_update(plan: Plan, bucket: BucketPlan) -> int:
    if bucket.sliced or not zero_stage(plan, expert=bucket.expert):
        return 0
    size, degree = (
        DTYPE_BYTES[plan.mathematics.precision.parameters],
        shard_degree(plan, expert=bucket.expert),
    )
    return all_gather_bytes(slice_elements(plan, bucket) * size, degree)


def _load(plan: Plan, rank: int, oracle: OracleStep) -> ExpertLoad | None:
    """Return how the oracle routed what the expert group of `rank` works on."""
    if plan.mesh.ep == 1:
        return None
    chosen = {layer: routed.chosen_BTK.cpu().numpy() for layer, routed in oracle.routed.items()}
    return load_of(plan, rank, chosen)


def bytes_held(evidence: Evidence) -> Iterator[Check]:
    """Compare the bytes of each kind that each rank holds after a step with `cost/`."""
    plan = evidence.plan
    for rank in range(plan.mesh.world_size):
        wanted = bytes_by_term(plan, rank)
        for oracle in evidence.oracle:
            held = evidence.observed.reports(oracle.step)[rank].bytes_held
            if held is None:
                continue
            for position, name in enumerate(sorted({*wanted, *held})):
                predicted, found = wanted.get(name, 0), held.get(name, 0)
                yield Check(
                    step=oracle.step,
                    subject=f"{name} of rank {rank}",
                    error=abs(found - predicted) / max(predicted, 1),
                    allowed=0.0,
                    detail=f"{found} bytes held, {predicted} by the formulas",
                    position=rank * len(wanted) + position,
                )


def bytes_by_term(plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes of each kind that `rank` is to hold, wherever they rest."""
    total: dict[str, int] = {}
    for term in planned_bytes_held(plan, rank):
        total[term.name] = total.get(term.name, 0) + term.bytes
    return total


def schedule_order(evidence: Evidence) -> Iterator[Check]:
    """Compare the actions that each rank ran with the schedule's."""
    for oracle in evidence.oracle:
        for rank, report in enumerate(evidence.observed.reports(oracle.step)):
            if report.actions is None:
                continue
            wanted = _planned_actions(evidence.plan, rank)
            ran = list(report.actions)
            yield Check(
                step=oracle.step,
                subject=f"actions of rank {rank}",
                error=0.0 if ran == wanted else 1.0,
                allowed=0.0,
                detail="" if ran == wanted else _difference(ran, wanted),
                position=rank,
            )


def _planned_actions(plan: Plan, rank: int) -> list[str]:
    row = schedule_of(plan).actions[plan.mesh.coordinates(rank)[Axis.PP]]
    return [str(action) for action in row]


def _difference(ran: list[str], wanted: list[str]) -> str:
    for position, (one, other) in enumerate(zip(ran, wanted, strict=False)):
        if one != other:
            return f"action {position} was {one}, the schedule has {other}"
    return f"{len(ran)} actions ran, the schedule has {len(wanted)}"
