# SPDX-License-Identifier: Apache-2.0
"""What must hold of a run that loses an island: who met, what all have then, what was sent.

Where something is wrong, replays in which a mistake is made say which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.axis import Axis
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.core.rulebook.islands import PROVE_LOST_ISLAND, PROVE_MEETINGS_REPLAYED
from echelon.cost.bytes.local_sgd import outer_bytes, rejoin_bytes
from echelon.layout.islands import islands_of
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.claims import ClaimResult, ProofClaim, first_failure
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.lost_islands.record import BACK_IN_ROUND, LOST_IN_ROUND, MOMENTUM, MeetingRecord
from echelon.proof.lost_islands.replay import MeetingMistake, MeetingReplay, MetIslands
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.optimizers import global_norm

REPLAY_TOLERANCE = 1e-10
"""Relative, in float64: sums are taken in another order, over a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostIslandEvidence:
    """Hold what the ranks of a plan wrote at meetings, and what a replay gives."""

    plan: Plan
    num_steps: int
    records: Sequence[MeetingRecord]
    met: Sequence[MetIslands]
    """Who met, as the first island tells, which is not lost."""
    replay: MeetingReplay

    def island_of(self, rank: int) -> int:
        """Return the island of a rank."""
        return rank // islands_of(self.plan)[0].size


def lost_island_evidence(
    plan: Plan, num_steps: int, records: Sequence[MeetingRecord]
) -> LostIslandEvidence:
    """Return the two sides of the proof."""
    met = [
        MetIslands(step=one.step, members=one.members, joins=one.joins)
        for one in records
        if one.rank == 0
    ]
    return LostIslandEvidence(
        plan=plan,
        num_steps=num_steps,
        records=records,
        met=met,
        replay=MeetingReplay(plan, met).run(),
    )


def _nothing_dropped(evidence: LostIslandEvidence) -> Iterator[Check]:
    plan = evidence.plan
    size = islands_of(plan)[0].size
    for one in evidence.met:
        mine = [record for record in evidence.records if record.step == one.step]
        for island in (*one.members, *one.joins):
            ranks = [r for r in mine if evidence.island_of(r.rank) == island]
            problem = "" if len(ranks) == size else f"{len(ranks)} of {size} ranks tell of it"
            yield exact_check(one.step - 1, f"ranks of island {island}", problem, island)
            wrong = _missing_elements(plan, ranks)
            yield exact_check(one.step - 1, f"elements of island {island}", wrong, island)
        for island in one.members:
            ranks = [r for r in mine if evidence.island_of(r.rank) == island and not r.came_in]
            for step in ranks[0].losses if ranks else ():
                every = global_batch(plan, step).sample_ids
                rows = len(every) // plan.mathematics.local_sgd.islands
                right = set(every[island * rows : (island + 1) * rows])
                seen = {sample for r in ranks for sample in r.samples.get(step, ())}
                problem = "" if seen == right else "other samples"
                yield exact_check(step, f"samples of island {island}", problem, island)


def _missing_elements(plan: Plan, ranks: Sequence[MeetingRecord]) -> str:
    held = {spec.name: torch.zeros(spec.shape, dtype=torch.bool) for spec in parameters(plan.model)}
    for piece in (piece for record in ranks for piece in record.pieces):
        if piece.kind != MOMENTUM:
            held[piece.name][piece.region] = True
    missing = sum(int((~one).sum()) for one in held.values())
    return f"nobody has {missing} elements" if missing else ""


def _same_meetings(evidence: LostIslandEvidence) -> Iterator[Check]:
    """Compare who met by what each rank tells; look for the loss and the return."""
    local = evidence.plan.mathematics.local_sgd
    told = {one.step: (one.members, one.joins) for one in evidence.met}
    for record in evidence.records:
        same = told.get(record.step) == (record.members, record.joins)
        problem = "" if same else f"{record.members} met there, or {told.get(record.step)}"
        yield exact_check(record.step - 1, f"meeting on rank {record.rank}", problem, record.rank)
    last, lost_at = local.islands - 1, LOST_IN_ROUND * local.every
    back_at = next((one.step for one in evidence.met if last in one.joins), None)
    for one in evidence.met:
        there = one.step < lost_at or (back_at is not None and one.step > back_at)
        wanted = tuple(range(local.islands if there else last))
        problem = "" if one.members == wanted else f"{one.members} met instead of {wanted}"
        yield exact_check(one.step - 1, "islands that met", problem)
        joins = (last,) if one.step == back_at else ()
        problem = "" if one.joins == joins else f"{one.joins} came in instead of {joins}"
        yield exact_check(one.step - 1, "islands that came in", problem)
    if local.restarts:
        late = back_at is None or back_at > BACK_IN_ROUND * local.every or back_at % local.every
        problem = f"it came in after step {back_at}" if late else ""
        yield exact_check(lost_at - 1, f"return of island {last}", problem)


def _replayed(evidence: LostIslandEvidence) -> Iterator[Check]:
    for record in evidence.records:
        island = evidence.island_of(record.rank)
        for step, seen in record.losses.items():
            right = evidence.replay.losses.get((step, island), float("nan"))
            yield Check(
                step,
                f"loss of island {island} on rank {record.rank}",
                abs(seen - right) / abs(right),
                allowed=REPLAY_TOLERANCE,
                detail=f"{seen:.12g} instead of {right:.12g}",
                position=island,
            )
        for (kind, name), error in errors_of(evidence.replay, record, island).items():
            yield Check(
                record.step - 1,
                f"{kind} of {name} on rank {record.rank}",
                error,
                allowed=REPLAY_TOLERANCE,
                position=1000 + record.rank,
            )


def errors_of(
    replay: MeetingReplay, record: MeetingRecord, island: int
) -> Mapping[tuple[str, str], float]:
    """Return the largest relative error of the pieces of each tensor of a record."""
    found: dict[tuple[str, str], float] = {}
    totals: dict[str, float] = {}
    for piece in record.pieces:
        right = replay.held.get((record.step, island, piece.kind))
        if right is None:
            return {(piece.kind, piece.name): float("inf")}
        if piece.kind not in totals:
            totals[piece.kind] = global_norm(right)
        whole = right[piece.name].double()
        scale = max(float(whole.norm()), FLOOR * totals[piece.kind], 1e-300)
        error = float((piece.values.double() - whole[piece.region]).norm()) / scale
        key = (piece.kind, piece.name)
        found[key] = max(found.get(key, 0.0), error)
    return found


def _bytes_sent(evidence: LostIslandEvidence) -> Iterator[Check]:
    """Compare what each rank sent to others in meetings that counted at once."""
    plan, axis = evidence.plan, Axis.DP_REPLICATE.value
    for record in evidence.records:
        if record.tries or record.came_in:
            continue
        terms = outer_bytes(plan, record.rank, record.step - 1, present=len(record.members))
        right = sum(int(term.bytes) for term in terms if term.axis == axis)
        if evidence.island_of(record.rank) == record.members[0]:
            right += len(record.joins) * rejoin_bytes(plan, record.rank)
        problem = "" if record.sent == right else f"{record.sent} instead of {right} bytes"
        subject = f"bytes of rank {record.rank}"
        yield exact_check(record.step - 1, subject, problem, record.rank)


EXPLAINED = 1e-8
"""What a mistake may leave unexplained, relative: others leave far more."""

MISTAKES = (
    MeetingMistake(
        name="absent counted",
        says="the sum over the islands that met is divided by the number of all, though one was "
        "not there",
        divides_by_all=True,
    ),
    MeetingMistake(
        name="momentum not given",
        says="an island that comes back begins without the outer momentum of the others",
        no_momentum=True,
    ),
    MeetingMistake(
        name="parameters not given",
        says="an island that comes back goes on from the first values of the run",
        own_values=True,
    ),
    MeetingMistake(
        name="momentum reset",
        says="the outer momentum begins anew where others meet than before",
        momentum_anew=True,
    ),
    MeetingMistake(
        name="islands",
        says="what islands moved is added up, and not divided by the number of those that met",
        adds_up=True,
    ),
)


LOST_ISLAND_CLAIMS = (
    ProofClaim(
        rules.PROVE_NOTHING_DROPPED,
        "nothing dropped: elements of each island, samples of every step that counts",
        _nothing_dropped,
        LostIslandEvidence,
    ),
    ProofClaim(
        PROVE_LOST_ISLAND,
        "a lost island is left out by all ranks of all others, and comes back at a meeting",
        _same_meetings,
        LostIslandEvidence,
    ),
    ProofClaim(
        PROVE_MEETINGS_REPLAYED,
        "a replay of the recorded meetings in one process gives the same on every island",
        _replayed,
        LostIslandEvidence,
    ),
    ProofClaim(
        rules.PROVE_BYTES_SENT,
        "bytes of meetings of fewer islands, and to one that comes back, are the formulas'",
        _bytes_sent,
        LostIslandEvidence,
    ),
)
"""All claims of such a run, in the order in which one causes the next."""


def diagnose_lost_island(
    evidence: LostIslandEvidence, results: Sequence[ClaimResult]
) -> Diagnosis | None:
    """Return what is wrong with a run, where something is."""
    failed = first_failure(results)
    if failed is None:
        return None
    result, failure = failed
    mistake = _explaining(evidence)
    says = failure.detail or f"off by {failure.error:.2g}, allowed {failure.allowed:.0e}"
    finding = ProofFinding("none", says, Axis.DP_REPLICATE.value, residual=failure.error)
    if mistake is not None:
        finding = replace(finding, factor=mistake.name, description=mistake.says)
    return Diagnosis.of(result, failure, finding, "")


def _explaining(evidence: LostIslandEvidence) -> MeetingMistake | None:
    """Return the mistake whose replay gives what islands have, where the right one does not."""
    if _largest_error(evidence, evidence.replay) < EXPLAINED:
        return None
    for mistake in MISTAKES:
        if (
            _largest_error(evidence, MeetingReplay(evidence.plan, evidence.met, mistake).run())
            < EXPLAINED
        ):
            return mistake
    return None


def _largest_error(evidence: LostIslandEvidence, replay: MeetingReplay) -> float:
    return max(
        error
        for record in evidence.records
        for error in errors_of(replay, record, evidence.island_of(record.rank)).values()
    )
