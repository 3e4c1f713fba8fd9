"""What is claimed of a run that loses an island, of records that are made by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.cost.bytes.local_sgd import outer_bytes, rejoin_bytes
from echelon.proof.claims.claims import ClaimResult, judge_claims
from echelon.proof.oracle.batches import global_batch
from echelon.proof.replays.lost_islands import (
    LOST_ISLAND_CLAIMS,
    MeetingReplay,
    MetIslands,
    lost_island_evidence,
)
from echelon.proof.replays.records import NUM_ROUNDS, HeldPiece, MeetingRecord
from echelon.proof.shrink import shrink
from tests.proof.replays.planted import elastic

PLAN = shrink(elastic(), precision="fp64", names_apart=True)
EVERY = PLAN.mathematics.local_sgd.every
MET = [
    MetIslands(
        step=number * EVERY,
        members=(0,) if number in (2, 3) else (0, 1),
        joins=(1,) if number == 3 else (),
    )
    for number in range(1, NUM_ROUNDS + 1)
]


def record(right: MeetingReplay, one: MetIslands, island: int) -> MeetingRecord:
    """Return what the rank of an island says that is as the replay is."""
    steps = range(one.step - EVERY, one.step) if island in one.members else ()
    rows = {step: global_batch(PLAN, step).sample_ids for step in steps}
    terms = outer_bytes(PLAN, island, one.step - 1, present=len(one.members))
    return MeetingRecord(
        rank=island,
        attempt=0,
        step=one.step,
        members=one.members,
        joins=one.joins,
        tries=0,
        came_in=island in one.joins,
        losses={step: right.losses[step, island] for step in steps},
        samples={
            step: ids[island * len(ids) // 2 : (island + 1) * len(ids) // 2]
            for step, ids in rows.items()
        },
        sent=sum(term.bytes for term in terms) + len(one.joins) * rejoin_bytes(PLAN, island),
        pieces=tuple(
            HeldPiece(kind=kind, name=name, offset=(0,) * value.dim(), values=value)
            for (step, i, kind), held in right.held.items()
            if (step, i) == (one.step, island)
            for name, value in held.items()
        ),
    )


def records() -> list[MeetingRecord]:
    """Return what two islands of one rank say."""
    right = MeetingReplay(PLAN, MET).run()
    return [record(right, one, island) for one in MET for island in (*one.members, *one.joins)]


def failed(results: tuple[ClaimResult, ...]) -> set[str]:
    """Return the rules of claims that do not hold."""
    return {one.rule.id for one in results if not one.holds}


def test_what_is_right_holds_and_each_wrong_record_breaks_its_claim() -> None:
    every = records()

    def broken(place: int, **wrong: object) -> set[str]:
        told = [replace(one, **wrong) if i == place else one for i, one in enumerate(every)]
        return failed(
            judge_claims(LOST_ISLAND_CLAIMS, lost_island_evidence(PLAN, MET[-1].step, told))
        )

    assert not broken(0)
    assert "prove-lost-island" in broken(1, members=(1,))
    assert broken(0, sent=every[0].sent + 8) == {"prove-bytes-sent"}
    few = dict.fromkeys(every[0].samples, (-1,))
    assert broken(0, samples=few) == {"prove-nothing-dropped"}
    piece = every[2].pieces[0]
    off = replace(piece, values=piece.values + torch.full_like(piece.values, 1e-6))
    assert broken(2, pieces=(off, *every[2].pieces[1:])) == {"prove-meetings-replayed"}
