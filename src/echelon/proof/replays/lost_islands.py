# SPDX-License-Identifier: Apache-2.0
"""A run that loses an island: its replay, and what must hold of who met, has and sent what.

One process trains the islands one after another, as those met that were there. Where something is
wrong, replays in which a mistake is made say which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.core.axis import Axis
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.core.rulebook.islands import PROVE_LOST_ISLAND, PROVE_MEETINGS_REPLAYED
from echelon.cost.bytes.local_sgd import outer_bytes, rejoin_bytes
from echelon.layout.islands import island_plan, islands_of
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.claims import ProofClaim
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.local_sgd import meets, outer_formula
from echelon.proof.oracle.optimizers import global_norm
from echelon.proof.oracle.oracle import OracleRun
from echelon.proof.replays.records import (
    BACK_IN_ROUND,
    EXPLAINED,
    LOST_IN_ROUND,
    MOMENTUM,
    PARAMETERS,
    REPLAY_TOLERANCE,
    VALUES,
    MeetingRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingMistake:
    """Say what a replay does otherwise; the right one does nothing so."""

    name: str = ""
    """The factor that it is told under."""
    says: str = ""
    """What it is, in words."""
    divides_by_all: bool = False
    """Whether the sum over those that met is divided by the number of all islands."""
    adds_up: bool = False
    """Whether it is divided by nothing."""
    no_momentum: bool = False
    """Whether an island that comes back begins with no outer momentum."""
    own_values: bool = False
    """Whether it goes on from the first values of the run."""
    momentum_anew: bool = False
    """Whether all islands forget their momentum where others met than before."""


RIGHT = MeetingMistake()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetIslands:
    """Say which islands met after so many steps, and which came in then."""

    step: int
    members: tuple[int, ...]
    joins: tuple[int, ...]


@dataclass(slots=True)
class MeetingReplay:
    """Replay recorded meetings of `plan`, in their order, with a mistake."""

    plan: Plan
    met: Sequence[MetIslands]
    mistake: MeetingMistake = RIGHT
    held: dict[tuple[int, int, str], dict[str, torch.Tensor]] = field(
        default_factory=dict[tuple[int, int, str], dict[str, torch.Tensor]]
    )
    """What each island has where it met or came in, by (steps done, island, kind)."""
    losses: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """The mean loss of a step (from 0) of an island, by (step, island): of those that count."""

    def run(self) -> MeetingReplay:
        """Take all steps up to the last meeting."""
        local, plan = self.plan.mathematics.local_sgd, self.plan
        runs = {i: OracleRun(island_plan(plan, i)) for i in range(local.islands)}
        outer = {i: {n: v.clone() for n, v in run.values.items()} for i, run in runs.items()}
        zeros = {n: torch.zeros_like(v) for n, v in outer[0].items()}
        momentum = {i: dict(zeros) for i in runs}
        first, met_before, done = dict(outer[0]), tuple(runs), 0
        for one in self.met:
            said = {
                (step, i): runs[i].step(step) for step in range(done, one.step) for i in one.members
            }
            self.losses |= {key: step.loss for key, step in said.items()}
            done = one.step
            if self.mistake.momentum_anew and one.members != met_before:
                momentum = {i: dict(zeros) for i in momentum}
            met_before = (*one.members, *one.joins)
            for name in (name for name in zeros if meets(local, name, one.step - 1)):
                moved = [outer[i][name] - runs[i].values[name] for i in one.members]
                mean = torch.stack(moved).sum(0) / self._divisor(one)
                for i in one.members:
                    outer[i][name], momentum[i][name] = outer_formula(
                        local, outer[i][name], mean, momentum[i][name]
                    )
                    runs[i].values[name] = outer[i][name]
            giver = one.members[0]
            for i in one.joins:
                outer[i] = dict(first if self.mistake.own_values else outer[giver])
                momentum[i] = dict(zeros if self.mistake.no_momentum else momentum[giver])
                runs[i] = OracleRun(island_plan(plan, i), initial=outer[i])
            for i in (*one.members, *one.joins):
                self.held[one.step, i, VALUES] = dict(runs[i].values)
                self.held[one.step, i, PARAMETERS] = dict(outer[i])
                self.held[one.step, i, MOMENTUM] = dict(momentum[i])
        return self

    def _divisor(self, one: MetIslands) -> int:
        if self.mistake.adds_up:
            return 1
        all_of_them = self.plan.mathematics.local_sgd.islands
        return all_of_them if self.mistake.divides_by_all else len(one.members)


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


def explaining(evidence: LostIslandEvidence) -> Iterator[MeetingMistake]:
    """Yield the mistakes whose replay gives what islands have, where the right one does not."""
    if _largest_error(evidence, evidence.replay) >= EXPLAINED:
        for mistake in MISTAKES:
            replay = MeetingReplay(evidence.plan, evidence.met, mistake).run()
            if _largest_error(evidence, replay) < EXPLAINED:
                yield mistake


def _largest_error(evidence: LostIslandEvidence, replay: MeetingReplay) -> float:
    return max(
        error
        for record in evidence.records
        for error in errors_of(replay, record, evidence.island_of(record.rank)).values()
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
