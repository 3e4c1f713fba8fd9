# SPDX-License-Identifier: Apache-2.0
"""What a plan promised beside its mathematics: bytes sent, bytes held, the order of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.data import EXPERT_SHARD_AXIS, STAGE_AXIS
from echelon.cost.bytes.expert_sent import ROUTING_TERM
from echelon.cost.bytes.held import bytes_held as planned_bytes_held
from echelon.cost.bytes.local_sgd import outer_bytes, outer_held
from echelon.cost.bytes.sent import bytes_sent as planned_bytes_sent
from echelon.cost.bytes.sent import bytes_sent_first
from echelon.cost.bytes.servers import TO_WORKERS_TERM
from echelon.cost.bytes.terms import SentTerm, all_gather_bytes, far_bytes_by_axis
from echelon.layout.buckets import plan_buckets, shard_degree, slice_elements, zero_stage
from echelon.layout.expert_load import ExpertLoad, expert_load_from_routing
from echelon.layout.stage import part_of
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.oracle.oracle import OracleStep
from echelon.schedule.from_plan import schedule_from_plan


def bytes_sent(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the bytes that each rank sent over each axis, in each step, with `cost/`.

    Bytes to ranks on other nodes are compared where every term of the axis has them.

    What goes to experts is that of the oracle's routing, whatever the ranks say of theirs.
    """
    plan = evidence.plan
    for oracle, rank, report in evidence.reports():
        if report.bytes_sent is None:
            continue
        load = _load(plan, rank, oracle)
        first = not oracle.fp8_maxima.steps
        wanted = bytes_by_axis(
            plan,
            rank,
            skipped=oracle.skipped,
            load=load,
            first=first,
            changed=evidence.changed_outside(oracle.step),
        )
        if (rounds := evidence.rounds) is not None:
            (place,) = rounds.island.lifted([rank])
            for term in outer_bytes(rounds.plan, place, oracle.step):
                wanted[term.axis] += term.bytes
        for axis in sorted({*wanted, *report.bytes_sent}):
            numbers = report.bytes_sent.get(axis, 0), wanted[axis]
            subject = f"bytes of rank {rank} over {axis}"
            yield _bytes_check(oracle.step, subject, numbers, "sent", rank)
        if evidence.rounds is None and not oracle.skipped and report.bytes_far is not None:
            # A skipped step leaves out gathers; an island numbers its nodes from 0.
            for axis, far in far_bytes_by_axis(_terms(plan, rank, load, first=first)).items():
                numbers = report.bytes_far.get(axis, 0), far
                subject = f"bytes of rank {rank} over {axis} to other nodes"
                yield _bytes_check(oracle.step, subject, numbers, "sent", rank)


def _terms(plan: Plan, rank: int, load: ExpertLoad | None, *, first: bool) -> tuple[SentTerm, ...]:
    """Return the terms of a step of a rank; `first`: of the first step of a run."""
    return (bytes_sent_first if first else planned_bytes_sent)(plan, rank, load)


def _bytes_check(
    step: int, subject: str, numbers: tuple[int, int], what: str, position: int
) -> Check:
    found, predicted = numbers
    error = abs(found - predicted) / max(predicted, 1)
    detail = f"{found} {what}, {predicted} by the formulas"
    return Check(step, subject, error, detail=detail, position=position)


def bytes_by_axis(
    plan: Plan,
    rank: int,
    *,
    skipped: bool,
    load: ExpertLoad | None = None,
    first: bool = False,
    changed: Collection[str] = (),
) -> Counter[str]:
    """Return the bytes that `rank` is to send over each axis in a step.

    A step that is skipped updates nothing: Muon sends no matrices, and parameters that are kept
    whole are not gathered. `load` is how the rank's expert group was routed, `first` whether it is
    the first step of a run.
    """
    total: Counter[str] = Counter()
    for term in _terms(plan, rank, load, first=first):
        of_update = term.axis == STAGE_AXIS and term.name != ROUTING_TERM
        of_update = of_update or term.name == TO_WORKERS_TERM
        if not (skipped and of_update):
            total[term.axis] += term.bytes
    for bucket in plan_buckets(plan, part_of(plan, rank)) if skipped else ():
        if bucket.frozen or (changed and set(changed).intersection(bucket.names)):
            continue
        if not bucket.sliced and zero_stage(plan, expert=bucket.expert):
            axis = EXPERT_SHARD_AXIS if bucket.expert else Axis.DP_SHARD.value
            size = DTYPE_BYTES[plan.mathematics.precision.parameters]
            degree = shard_degree(plan, expert=bucket.expert)
            total[axis] -= all_gather_bytes(slice_elements(plan, bucket) * size, degree)
    return total


def _load(plan: Plan, rank: int, oracle: OracleStep) -> ExpertLoad | None:
    """Return how the oracle routed what the expert group of `rank` works on."""
    if plan.mesh.ep == 1:
        return None
    chosen = {layer: routed.chosen_BTK.cpu().numpy() for layer, routed in oracle.routed.items()}
    return expert_load_from_routing(plan, rank, chosen)


def bytes_held(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the bytes of each kind that each rank holds after a step with `cost/`."""
    for rank in range(evidence.plan.mesh.world_size):
        wanted = bytes_by_term(evidence.plan, rank)
        if (rounds := evidence.rounds) is not None:
            (place,) = rounds.island.lifted([rank])
            wanted.update({term.name: term.bytes for term in outer_held(rounds.plan, place)})
        for oracle in evidence.steps:
            held = evidence.run.reports(oracle.step)[rank].bytes_held
            if held is None:
                continue
            for position, name in enumerate(sorted({*wanted, *held})):
                numbers = held.get(name, 0), wanted[name]
                place, subject = rank * len(wanted) + position, f"{name} of rank {rank}"
                yield _bytes_check(oracle.step, subject, numbers, "bytes held", place)


def bytes_by_term(plan: Plan, rank: int) -> Counter[str]:
    """Return the bytes of each kind that `rank` is to hold, wherever they rest."""
    total: Counter[str] = Counter()
    for term in planned_bytes_held(plan, rank):
        total[term.name] += term.bytes
    return total


def schedule_order(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the actions that each rank ran with the schedule's."""
    plan = evidence.plan
    for oracle, rank, report in evidence.reports():
        if report.actions is not None and not plan.mesh.is_server(rank):
            row = schedule_from_plan(plan).actions[plan.mesh.coordinates(rank)[Axis.PP]]
            problem = _difference(list(report.actions), [str(action) for action in row])
            yield exact_check(oracle.step, f"actions of rank {rank}", problem, rank)


def _difference(ran: list[str], wanted: list[str]) -> str:
    for position, (one, other) in enumerate(zip(ran, wanted, strict=False)):
        if one != other:
            return f"action {position} was {one}, the schedule has {other}"
    same = len(ran) == len(wanted)
    return "" if same else f"{len(ran)} actions ran, the schedule has {len(wanted)}"
