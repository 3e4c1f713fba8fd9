# SPDX-License-Identifier: Apache-2.0
"""What ranks hold and send, as rows of the report of `echelon plan`.

Ranks at one place of their pipelines hold and send the same, so a place is one row; what differs
between them (Muon's matrices, padding) is told of the rank with most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from echelon.core.axis import MESH_AXES, Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import Plan
from echelon.cost.bytes.data import muon_bytes
from echelon.cost.bytes.held import ZeroChoice, held_buckets, held_terms, zero_choices
from echelon.cost.bytes.sent import bytes_sent_without_muon
from echelon.cost.bytes.terms import HeldTerm, Pool, SentTerm
from echelon.cost.bytes.transient import transient_terms
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import expert_index_of, pp_rank_of, rank_part


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Hold what every rank at one place of the pipeline holds, in steps too, and sends per step."""

    pp_rank: int
    """The place in the pipeline."""
    stages: tuple[int, ...]
    """The stages that it has."""
    ranks: tuple[int, ...]
    """The ranks at that place."""
    blocks: tuple[int, ...]
    """The blocks of all its stages."""
    held: tuple[HeldTerm, ...]
    """Terms of bytes between steps."""
    step: tuple[HeldTerm, ...]
    """Terms of bytes that a step takes beside those."""
    sent: tuple[SentTerm, ...]
    """Terms of bytes sent per step, of Muon those of the rank that sends most."""
    choices: tuple[ZeroChoice, ...]
    """The choices of ZeRO, and what each would hold."""
    muon: Mapping[int, int]
    """Bytes that each rank sends of matrices, by rank."""


def group_equal_rows(rows: Sequence[StageRow]) -> list[list[StageRow]]:
    """Return consecutive rows that differ in nothing but their place together."""

    def shown(row: StageRow) -> tuple[object, ...]:
        return len(row.ranks), len(row.blocks), row.held, row.step, row.sent

    return [[*run] for _, run in groupby(rows, key=shown)]


def stage_rows(plan: Plan) -> list[StageRow]:
    """Return one row for each rank of a pipeline."""
    others = [axis for axis in MESH_AXES if axis is not Axis.PP]
    rows: list[StageRow] = []
    for ranks in plan.mesh.groups(*others):
        pp_rank = pp_rank_of(plan, ranks[0])
        part = rank_part(plan, pp_rank)
        muon = _muon(plan, pp_rank, ranks)
        most = max(muon.values(), key=lambda terms: sum(term.bytes for term in terms), default=())
        rows.append(
            StageRow(
                pp_rank=pp_rank,
                stages=tuple(stage.stage for stage in part.stages),
                ranks=ranks,
                blocks=part.blocks,
                held=held_in_stage(plan, pp_rank, ranks),
                step=transient_terms(plan, pp_rank),
                sent=(*_most_sent(plan, pp_rank), *most),
                choices=zero_choices(plan, pp_rank),
                muon={rank: sum(term.bytes for term in terms) for rank, terms in muon.items()},
            )
        )
    return rows


def _most_sent(plan: Plan, pp_rank: int) -> tuple[SentTerm, ...]:
    """Return what the rank sends that sends most: a mask may let context ranks differ."""
    by_rank = [bytes_sent_without_muon(plan, pp_rank, cp_rank) for cp_rank in range(plan.mesh.cp)]
    return max(by_rank, key=lambda terms: sum(term.bytes for term in terms))


def context_ranks_differ(plan: Plan) -> str:
    """Return what to say where a mask lets context ranks send unequal amounts, else nothing."""
    by_rank = [bytes_sent_without_muon(plan, 0, cp_rank) for cp_rank in range(plan.mesh.cp)]
    sent = [sum(term.bytes for term in terms if term.axis == Axis.CP) for terms in by_rank]
    if min(sent) == max(sent):
        return ""
    return (
        f"The mask needs less of some keys than of others: context ranks send {min(sent):,} to "
        f"{max(sent):,} bytes over cp; what is shown is the rank that sends most."
    )


def place_head(rows: Sequence[StageRow]) -> str:
    """Return what to call the places of a pipeline: stages, where each has one."""
    return "stage" if all(row.stages == (row.pp_rank,) for row in rows) else "pp rank"


def _muon(plan: Plan, pp_rank: int, ranks: Sequence[int]) -> dict[int, tuple[SentTerm, ...]]:
    """Return what each rank at a place sends of Muon's matrices; nothing without Muon."""
    if not OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices:
        return {}
    shares = {rank: expert_index_of(plan, rank) for rank in ranks}
    exchanges = {share: muon_exchange(plan, pp_rank, share) for share in {*shares.values()}}
    sent = {rank: muon_bytes(plan, exchanges[share], rank) for rank, share in shares.items()}
    return {rank: tuple(one for one in terms if one.bytes) for rank, terms in sent.items()}


def held_in_stage(plan: Plan, pp_rank: int, ranks: Sequence[int]) -> tuple[HeldTerm, ...]:
    """Return what each rank at a place holds, with the padding of the one that has most of it."""
    buckets = held_buckets(plan, pp_rank)
    first = [rank for rank in ranks if plan.mesh.coordinates(rank)[Axis.DP_REPLICATE] == 0]
    by_rank = [held_terms(plan, buckets, rank) for rank in first]
    return tuple(
        replace(terms[0], padding=max(term.padding for term in terms))
        for terms in zip(*by_rank, strict=True)
    )


def pool_bytes(terms: Sequence[HeldTerm], pool: Pool) -> int:
    """Return the bytes of terms in one pool."""
    return sum(term.bytes for term in terms if term.pool == pool)


def memory_bytes(plan: Plan, terms: Sequence[HeldTerm]) -> int:
    """Return the bytes that count against the memory of a device.

    A CPU's device is the memory of its host: what rests in either is in the same memory.
    """
    shared = plan.cluster.backend == "gloo"
    return pool_bytes(terms, "device") + shared * pool_bytes(terms, "host")


def sent_by_axis(row: StageRow) -> dict[str, int]:
    """Return the bytes that a rank sends per step over each axis."""
    total: dict[str, int] = {}
    for term in row.sent:
        total[term.axis] = total.get(term.axis, 0) + term.bytes
    return total


def most_held_bytes(plan: Plan, rows: Sequence[StageRow]) -> int:
    """Return what the rank that holds most holds in the memory of its device between steps."""
    return max(memory_bytes(plan, row.held) for row in rows)


def most_step_bytes(plan: Plan, rows: Sequence[StageRow]) -> int:
    """Return what a rank holds in the memory of its device in a step at most, no activations."""
    return max(memory_bytes(plan, row.held) + memory_bytes(plan, row.step) for row in rows)
