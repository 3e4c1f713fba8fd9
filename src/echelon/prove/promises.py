"""What a plan promised beside its mathematics: bytes sent, bytes held, the order of actions."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.buckets import plan_buckets, shard_degree, slice_elements
from echelon.cost.bytes_held import bytes_held as planned_bytes_held
from echelon.cost.bytes_sent import bytes_sent as planned_bytes_sent
from echelon.cost.collectives import all_gather_bytes
from echelon.cost.data_bytes import STAGE_AXIS
from echelon.cost.stage import pp_rank_of, rank_part
from echelon.prove.checks import Check, Evidence
from echelon.schedule.of_plan import schedule_of


def bytes_sent(evidence: Evidence) -> Iterator[Check]:
    """Compare the bytes that each rank sent over each axis, in each step, with `cost/`."""
    plan = evidence.plan
    for oracle in evidence.oracle:
        for rank, report in enumerate(evidence.observed.reports(oracle.step)):
            if report.bytes_sent is None:
                continue
            wanted = bytes_by_axis(plan, rank, skipped=oracle.skipped)
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


def bytes_by_axis(plan: Plan, rank: int, *, skipped: bool) -> dict[str, int]:
    """Return the bytes that `rank` is to send over each axis in a step.

    A step that is skipped updates nothing: Muon sends no matrices, and parameters that are kept
    whole are not gathered.
    """
    total: dict[str, int] = {}
    for term in planned_bytes_sent(plan, rank):
        if not (skipped and term.axis == STAGE_AXIS):
            total[term.axis] = total.get(term.axis, 0) + term.bytes
    if skipped and plan.layout.zero.stage:
        total[Axis.DP_SHARD] = total.get(Axis.DP_SHARD, 0) - _gathered_after_update(plan, rank)
    return total


def _gathered_after_update(plan: Plan, rank: int) -> int:
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    buckets = plan_buckets(plan, rank_part(plan, pp_rank_of(plan, rank)))
    return sum(
        all_gather_bytes(slice_elements(plan, bucket) * size, shard_degree(plan))
        for bucket in buckets
        if not bucket.sliced
    )


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
