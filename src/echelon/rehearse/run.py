"""A whole plan, rehearsed: one rank of each class, the order of all, and what the plan said.

The ranks are rehearsed in processes of this machine, a few at a time; none of them talks to another.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.planner.predict.peak_bytes import peak_bytes_by_place
from echelon.rehearse.classes import RankClasses
from echelon.rehearse.in_flight import Misuse
from echelon.rehearse.log import Entry, HostRead
from echelon.rehearse.order import OrderFault, OrderProof, RankClass, prove_order
from echelon.rehearse.rank import RankRehearsal, rehearse_rank

ALLOWED_READS = frozenset({"", "routing sizes"})
"""The tasks in which a host may read from the device: none of a schedule."""

MEMORY_TOLERANCE = 0.02
"""How far the peak of a rank may be from what its plan says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalFault:
    """Say what is wrong: the rule that it breaks, where, and of which rank."""

    rule: str
    rank: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Hold what the ranks of a plan do on GPUs, and what is wrong with it."""

    plan: Plan
    """What was rehearsed, on NCCL."""
    ranks: tuple[RankRehearsal, ...]
    """One rank of each class; its log is not kept."""
    checked: tuple[int, ...]
    """Ranks whose logs were compared with those of their class."""
    faults: tuple[RehearsalFault, ...]
    """All that is wrong."""
    num_operations: int
    """Operations in the order that was proven."""
    planned: Mapping[int, Mapping[str, float]]
    """Bytes that the plan says each of the ranks holds at its peak, by term."""
    seconds: float
    """How long the rehearsal took."""

    @property
    def holds(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.faults

    def memory_error(self, rank: RankRehearsal) -> float:
        """Return by how much the plan's peak is above that of a rank, as a share of it."""
        return sum(self.planned[rank.rank].values()) / rank.peak_bytes - 1.0


def on_nccl(plan: Plan) -> Plan:
    """Return a plan as it is on GPUs: one for a CPU adds up its sums itself, and offloads apart."""
    return replace(plan, cluster=replace(plan.cluster, backend="nccl"))


def rehearse(plan: Plan, *, workers: int | None = None) -> Rehearsal:
    """Rehearse every distinct rank of `plan`, in `workers` processes (default: one per core)."""
    started = time.perf_counter()
    plan, classes = on_nccl(plan), RankClasses(on_nccl(plan))
    first, checked = classes.first_ranks(), classes.checked()
    logs: dict[RankClass, Sequence[Entry]] = {}
    ranks: list[RankRehearsal] = []
    faults: list[RehearsalFault] = []
    for one in _rehearsed(plan, [*first, *checked], workers or os.cpu_count() or 1):
        known = logs.get(classes.of(one.rank))
        if known is None:
            logs[classes.of(one.rank)] = one.entries
            ranks.append(replace(one, entries=()))
            faults += _faults_of(one)
        elif not _alike(known, one.entries):
            text = f"rank {one.rank} does other things than its class {classes.of(one.rank)}"
            faults.append(RehearsalFault(rule="rehearse-class", rank=one.rank, text=text))
    proof = prove_order(logs, classes.of)
    faults += [_of_order(fault) for fault in proof.faults]
    places = peak_bytes_by_place(plan)
    pp = {rank: plan.mesh.coordinates(rank)[Axis.PP] for rank in first}
    return Rehearsal(
        plan=plan,
        ranks=tuple(ranks),
        checked=tuple(checked),
        faults=tuple(faults),
        num_operations=proof.num_operations,
        planned={rank: places[place] for rank, place in pp.items()},
        seconds=time.perf_counter() - started,
    )


def _rehearsed(plan: Plan, ranks: Sequence[int], workers: int) -> Iterator[RankRehearsal]:
    """Yield what each rank did, in their order."""
    if len(ranks) == 1 or workers == 1:
        yield from (rehearse_rank(plan, rank) for rank in ranks)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, initializer=torch.set_num_threads, initargs=(1,)) as all_:
        yield from all_.map(rehearse_rank, [plan] * len(ranks), ranks)


def _faults_of(rank: RankRehearsal) -> Iterator[RehearsalFault]:
    for misuse in rank.misuses:
        yield _of_memory(rank.rank, misuse)
    told: set[str] = set()
    for entry in rank.entries:
        if isinstance(entry, HostRead) and entry.task not in ALLOWED_READS:
            text = f"the host waits for {entry.operation} at {entry.where} in {entry.task}"
            if text not in told:
                told.add(text)
                yield RehearsalFault(rule="rehearse-host-read", rank=rank.rank, text=text)


def _of_memory(rank: int, misuse: Misuse) -> RehearsalFault:
    return RehearsalFault(rule=f"rehearse-{misuse.rule}", rank=rank, text=misuse.text)


def _of_order(fault: OrderFault) -> RehearsalFault:
    return RehearsalFault(rule=f"rehearse-{fault.rule}", rank=None, text=fault.text)


def _alike(one: Sequence[Entry], other: Sequence[Entry]) -> bool:
    """Return whether two ranks of a class do the same, each with members of its own."""
    from echelon.rehearse.log import Issue

    def bare(entry: Entry) -> object:
        if isinstance(entry, Issue):
            return replace(entry, members=(len(entry.members),))
        return entry

    return len(one) == len(other) and all(
        bare(a) == bare(b) for a, b in zip(one, other, strict=True)
    )


__all__ = ["OrderProof", "Rehearsal", "RehearsalFault", "on_nccl", "rehearse"]
