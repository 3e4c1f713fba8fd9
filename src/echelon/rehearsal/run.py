# SPDX-License-Identifier: Apache-2.0
"""A whole plan, rehearsed: one rank of each class, the order of all, and what the plan said.

The ranks are rehearsed in processes of this machine, a few at a time; none talks to another.

Ranks of one class do the same. What a rank gives its communicators follows from its stages, and
from its place in the ring of context ranks where its positions need other blocks of keys than
theirs. Ranks that differ in their other coordinates only do the same with other samples, other
columns or heads, or other slices of as many elements. `RankClasses.checked` names some of those,
whose logs are compared.

Where matrices have owners (Muon), a rank has the memory and the kernels of what it owns. Its log is
that of the others: one exchange for each bucket and direction, of any sizes, whoever owns what. So
the rank that owns most stands for its class, and the one that owns least is among those compared.

Where sums are made of messages, what a rank sends depends on its place among data ranks: each is
rehearsed. So is each parameter server: ranges of buckets may differ by an element.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from random import Random
from typing import Any, Self

import torch

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.errors import InfeasiblePlan, Problem, ProofFailed
from echelon.core.messages.notes import PROGRESS
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.plan import Plan
from echelon.core.rulebook import planner as rules
from echelon.core.rulebook.servers import ASYNCHRONOUS_ORDER_IS_NOT_KNOWN
from echelon.core.rules import Rule
from echelon.cost.peak.rank_peak import PeakWalk, with_few_microbatches
from echelon.layout.islands import inner_plan, islands_of
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import expert_index_of, pp_rank_of
from echelon.parallel.expert.token_dispatcher import ROWS_OF_EXPERTS
from echelon.rehearsal.memory import MISSING_WAIT, NEVER_AWAITED, RELEASED_IN_FLIGHT
from echelon.rehearsal.numbers import PlanNumber, plan_numbers, with_sums_of_nccl
from echelon.rehearsal.order import (
    DEADLOCK,
    MISMATCH,
    MISSING,
    OTHER_DATA,
    RECEIVE,
    Entry,
    HostRead,
    Issue,
    RankClass,
    prove_order,
)
from echelon.rehearsal.patterns import Pattern, patterns_of
from echelon.rehearsal.rank import (
    RankRehearsal,
    planned_bytes,
    rehearse_rank,
    with_short_rounds,
)
from echelon.rehearsal.roofline import Roofline, roofline_of_plan
from echelon.rehearsal.shapes import KnownResults
from echelon.rehearsal.traces import TraceFolder

EVERY_RANK = 16
"""Up to so many ranks each is a class of its own."""

CHECKED_RANKS = 4
"""Ranks that are rehearsed beside their class, to compare."""


class RankClasses:
    """Know the class of each rank of a plan."""

    def __init__(self, plan: Plan, *, by_context: bool = True) -> None:
        """Look at what tells the ranks of `plan` apart; `by_context`: context ranks, too."""
        self._mesh, self._by_context = plan.mesh, by_context
        self._neighbours = plan.layout.context.ulysses_degree
        # What a rank sends of a sum that is made of messages depends on its place.
        messages = plan.layout.collectives.algorithm != BACKEND
        self._each = messages or plan.mesh.world_size <= EVERY_RANK
        self._owned = Counter[int]() if self._each else owned_elements(plan)

    @property
    def are_ranks(self) -> bool:
        """True if each rank is a separate class."""
        return self._each

    def of(self, rank: int) -> RankClass:
        """Return the class of a rank."""
        if self._each or self._mesh.is_server(rank):
            return (rank,)
        place = self._mesh.coordinates(rank)
        ring_place = place[Axis.CP] // self._neighbours
        return (place[Axis.PP], ring_place) if self._by_context else (place[Axis.PP],)

    def first_ranks(self) -> list[int]:
        """Return the rank of each class that owns most, in the order of classes; or its first."""
        found: dict[RankClass, int] = {}
        for rank in range(self._mesh.world_size):
            known = found.setdefault(self.of(rank), rank)
            if self._owned[rank] > self._owned[known]:
                found[self.of(rank)] = rank
        return list(found.values())

    def context_ranks(self) -> list[int]:
        """Return a rank of each place in the ring of rank 0; none in small worlds."""
        places = range(0, self._mesh.cp, self._neighbours)
        if self._each or len(places) == 1:
            return []
        return [self._mesh.rank({Axis.CP: place}) for place in places]

    def checked(self, seed: int = 0) -> Sequence[int]:
        """Return ranks that do not stand for their class: the last one, some at random, and where
        matrices have owners the one that owns least."""
        others = sorted(set(range(self._mesh.world_size)) - set(self.first_ranks()))
        if len(others) <= CHECKED_RANKS:
            return others
        least = [min(others, key=lambda rank: self._owned[rank])] if self._owned else []
        found = {others[-1], *least}
        rest = [one for one in others if one not in found]
        return sorted([*found, *Random(seed).sample(rest, CHECKED_RANKS - len(found))])


def owned_elements(plan: Plan) -> Counter[int]:
    """Return the elements of the matrices that each rank owns; none without owners."""
    found = Counter[int]()
    if not OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices:
        return found
    if islands := islands_of(plan):
        owned = owned_elements(inner_plan(plan))
        return Counter({one.first_rank + rank: n for one in islands for rank, n in owned.items()})
    ranks = range(plan.mesh.world_size)
    places = {rank: (pp_rank_of(plan, rank), expert_index_of(plan, rank)) for rank in ranks}
    # All shares of the experts have the same other matrices, with the same owners.
    for place in {*places.values()}:
        owned = Counter[int]()
        for one in muon_exchange(plan, *place).matrices:
            owned[one.owner] += prod(one.shape)
        found |= {rank: owned[rank] for rank in ranks if places[rank] == place}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalFault:
    """Say what is wrong: the rule that it breaks, where, and the ranks that do it."""

    rule: Rule
    ranks: tuple[int, ...]
    text: str

    def problem(self) -> Problem:
        """Return the fault as a problem."""
        where = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return self.rule.problem(f"{self.text}{where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Hold what the ranks of a plan do on GPUs, and what is wrong with it."""

    plan: Plan
    """What was rehearsed: on NCCL, and with so many microbatches."""
    num_microbatches: int
    """Microbatches of a step of the plan that was asked for."""
    ranks: tuple[RankRehearsal, ...]
    """One rank of each class; the entries of its log are not kept."""
    checked: tuple[int, ...]
    """Ranks whose logs were compared with those of their class."""
    faults: tuple[RehearsalFault, ...]
    """All that is wrong."""
    patterns: tuple[Pattern, ...]
    """Kinds of calls, and why no order hangs or mixes data; none where calls do not fit."""
    num_operations: int
    """Operations in the order that was proven."""
    planned: Mapping[int, Mapping[str, float]]
    """Bytes that the plan says each of the ranks holds at its peak, by term."""
    sent: Mapping[int, Mapping[str, int]]
    """Bytes that the plan says each of the ranks sends in a step, by axis."""
    numbers: tuple[PlanNumber, ...]
    """Numbers of the plan, compared with each of the ranks."""
    seconds: float
    """How long the rehearsal took."""
    roofline: Roofline | None = None
    """Seconds of the counted work; None where the devices of the plan are processors."""

    @property
    def holds(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.faults

    @property
    def fullest(self) -> RankRehearsal:
        """Return the rank with the highest peak."""
        return max(self.ranks, key=lambda one: one.peak_bytes)

    def memory_error(self, rank: RankRehearsal) -> float:
        """Return by how much the plan's peak is above that of a rank, as a share of it."""
        return sum(self.planned[rank.rank].values()) / rank.peak_bytes - 1.0

    def require(self) -> None:
        """Raise ProofFailed, with a problem for each fault, unless there is none."""
        if self.faults:
            raise ProofFailed([fault.problem() for fault in self.faults])

    def to_json(self) -> dict[str, Any]:
        """Return the rehearsal as a JSON object."""
        return {
            "plan": self.plan.name,
            "plan_hash": self.plan.content_hash(),
            "world_size": self.plan.mesh.world_size,
            "microbatches": {
                "rehearsed": self.plan.num_microbatches,
                "step": self.num_microbatches,
            },
            "holds": self.holds,
            "faults": [
                {"rule": one.rule.id, "ranks": list(one.ranks), "text": one.text}
                for one in self.faults
            ],
            "num_operations": self.num_operations,
            "patterns": [pattern.to_json() for pattern in self.patterns],
            "checked_ranks": list(self.checked),
            "seconds": self.seconds,
            "roofline": None if self.roofline is None else self.roofline.to_json(),
            "ranks": [self._rank_json(one) for one in self.ranks],
        }

    def _repr_html_(self) -> str | None:
        """Return the rehearsal, as a notebook shows it: its page without a script."""
        return NOTEBOOK_VIEWS.html("rehearsal", self)

    def _rank_json(self, rank: RankRehearsal) -> dict[str, object]:
        return {
            "rank": rank.rank,
            "peak_bytes": rank.peak_bytes,
            "planned_peak_bytes": sum(self.planned[rank.rank].values()),
            "held_bytes": dict(rank.held),
            "at_peak": dict(rank.at_peak),
            "most_by_term": dict(rank.most),
            "planned_by_term": dict(self.planned[rank.rank]),
            "sent_bytes": dict(rank.sent),
            "planned_sent_bytes": dict(self.sent[rank.rank]),
            "numbers": [n.to_json() for n in self.numbers if n.rank == rank.rank],
            "host_reads": [
                {"action": action, "what": what, "count": count}
                for (action, what), count in rank.reads.items()
            ],
            "work": {
                task or "outside of actions": {
                    "kernels": work.kernels,
                    "bytes": work.bytes,
                    "flops": work.flops,
                }
                for task, work in rank.work.items()
            },
            "curve": [
                {"action": one.action, "kept": sum(one.kept.values()), "peak": one.peak_bytes}
                for one in rank.points
            ],
        }


PROGRESS_EVERY_S = 0.5
"""How often progress is logged while no rank ends."""

_RULES: Mapping[str, Rule] = {
    DEADLOCK: rules.REHEARSE_DEADLOCK,
    MISMATCH: rules.REHEARSE_MISMATCH,
    MISSING: rules.REHEARSE_MISSING,
    OTHER_DATA: rules.REHEARSE_OTHER_DATA,
    MISSING_WAIT: rules.REHEARSE_MISSING_WAIT,
    RELEASED_IN_FLIGHT: rules.REHEARSE_RELEASED_IN_FLIGHT,
    NEVER_AWAITED: rules.REHEARSE_NEVER_AWAITED,
}

_UNAVOIDABLE = frozenset({ROWS_OF_EXPERTS})
"""What the host has to read in an action: sizes that the routing of tokens decides."""

_Found = tuple[Rule, str]
"""A rule that is broken, and how."""


def on_nccl(plan: Plan) -> Plan:
    """Return a plan as it is on GPUs: one for a CPU adds up its sums itself, and offloads apart."""
    return replace(plan, cluster=replace(plan.cluster, backend="nccl"))


def rehearse(
    plan: Plan, *, workers: int | None = None, whole: bool = False, traces: Path | None = None
) -> Rehearsal:
    """Rehearse every distinct rank of `plan`, in `workers` processes (default: one per core).

    Steps have few microbatches (`with_few_microbatches`), or with `whole` all of them. A trace of
    each distinct rank is written into the folder `traces`, which must not be there yet, or into
    NAME-RANK.json.gz where `traces` is NAME.json.gz.
    """
    if plan.mathematics.updates.is_asynchronous:
        raise InfeasiblePlan(
            ASYNCHRONOUS_ORDER_IS_NOT_KNOWN.problem(
                'servers.updates = "asynchronous": which push comes first is known after a run',
                key="servers.updates",
                suggestions=('servers.updates = "synchronous"', "echelon prove"),
            )
        )
    started = time.perf_counter()
    asked, num_microbatches = plan, plan.num_microbatches
    plan = with_short_rounds(plan)
    plan = on_nccl(plan) if whole else with_few_microbatches(on_nccl(plan))
    logs: dict[RankClass, Sequence[Entry]] = {}
    ranks: list[RankRehearsal] = []
    found: dict[_Found, list[int]] = {}
    folder = None if traces is None else TraceFolder.new(traces, plan)
    with _Processes(workers or os.cpu_count() or 1) as processes:
        classes, checked, rehearsed = _in_classes(plan, processes, folder)
        for rank in rehearsed:
            log = logs.setdefault(classes.of(rank.rank), rank.entries)
            if rank.rank not in checked:
                ranks.append(replace(rank, entries=()))
                for fault in _faults_of(rank):
                    found.setdefault(fault, []).append(rank.rank)
            if not _alike(log, rank.entries):
                text = f"this rank does other things than its class {classes.of(rank.rank)}"
                found.setdefault((rules.REHEARSE_CLASS, text), []).append(rank.rank)
    PROGRESS.info("checking that the operations of all ranks have one order")
    proof = prove_order(logs, classes.of)
    found |= {(_RULES[fault.rule], fault.text): [] for fault in proof.faults}
    walk = PeakWalk(with_sums_of_nccl(plan))
    peaks = {rehearsal.rank: walk.peak(rehearsal.rank) for rehearsal in ranks}
    sent = {rank: planned_bytes(plan, rank) for rank in peaks}
    numbers = tuple(
        number
        for rehearsal in ranks
        for number in plan_numbers(plan, rehearsal, peaks[rehearsal.rank], sent[rehearsal.rank])
    )
    for number in numbers:
        if not number.holds:
            found.setdefault((rules.REHEARSE_NUMBER, number.text), []).append(number.rank)
    return Rehearsal(
        plan=plan,
        num_microbatches=num_microbatches,
        ranks=tuple(ranks),
        checked=tuple(checked),
        faults=tuple(
            RehearsalFault(rule=rule, ranks=tuple(where), text=text)
            for (rule, text), where in found.items()
        ),
        patterns=() if proof.faults else patterns_of(logs, every_rank=classes.are_ranks),
        num_operations=proof.num_operations,
        planned={rank: peak.terms for rank, peak in peaks.items()},
        sent=sent,
        numbers=numbers,
        seconds=time.perf_counter() - started,
        roofline=None if asked.cluster.backend == "gloo" else roofline_of_plan(asked, plan, ranks),
    )


def _in_classes(
    plan: Plan, processes: _Processes, folder: TraceFolder | None
) -> tuple[RankClasses, Sequence[int], Iterable[RankRehearsal]]:
    """Return the classes, the ranks that are compared with theirs, and all that are rehearsed.

    Context ranks are classes of their own where those of the first stage differ.
    """
    places = RankClasses(plan).context_ranks()
    contexts = list(processes.rehearse(plan, places, folder, "places of a ring compared"))
    apart = any(not _alike(contexts[0].entries, one.entries) for one in contexts)
    classes = RankClasses(plan, by_context=apart)
    checked, known = classes.checked(), {one.rank for one in contexts}
    first = [one for one in classes.first_ranks() if one not in known]
    checked = [one for one in checked if one not in known]
    if folder is not None:
        folder = replace(folder, left_out=frozenset(checked))
    asked = "ranks rehearsed, each for all that are like it"
    rehearsed = processes.rehearse(plan, [*first, *checked], folder, asked)
    return classes, checked, chain(contexts, rehearsed)


class _Processes:
    """Processes that rehearse ranks, or this one where one is enough."""

    def __init__(self, count: int) -> None:
        """Start none before they are needed."""
        self._count = count
        self._executor: ProcessPoolExecutor | None = None
        self._others: set[int | None] = set()

    def __enter__(self) -> Self:
        """Return these processes."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes; after an error, without waiting for their work."""
        if self._executor is None:
            return
        if any(error):
            for process in multiprocessing.active_children():
                if process.pid not in self._others:
                    process.kill()
        self._executor.shutdown(cancel_futures=True)

    def rehearse(
        self, plan: Plan, ranks: Sequence[int], traces: TraceFolder | None, words: str
    ) -> Iterator[RankRehearsal]:
        """Yield the rehearsals of ranks in order; log the number that is done, in `words`."""
        if len(ranks) < 2 or self._count == 1:
            known, progress = KnownResults(), RehearsedCount(len(ranks), words)
            for number, rank in enumerate(ranks):
                progress.log(number)
                yield rehearse_rank(plan, rank, known=known, traces=traces)
            return
        if self._executor is None:
            fork = multiprocessing.get_context("fork")
            # Processes of the calling program are not ours to kill.
            self._others = {process.pid for process in multiprocessing.active_children()}
            one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
            self._executor = ProcessPoolExecutor(self._count, fork, **one_thread)
        progress = RehearsedCount(len(ranks), words)
        job = partial(_rehearse_beside_others, plan, traces)
        futures = [self._executor.submit(job, rank) for rank in ranks]
        for place, future in enumerate(futures):
            while not future.done():
                progress.log(place + sum(later.done() for later in futures[place:]))
                wait([future], PROGRESS_EVERY_S)
            yield future.result()
            # Which may be large.
            futures[place] = Future()


class RehearsedCount:
    """Log the number of ranks that are done, and the time left."""

    def __init__(self, total: int, words: str) -> None:
        """Begin with none of `total` ranks."""
        self._total, self._words, self._start_s = total, words, time.monotonic()

    def log(self, done: int) -> None:
        """Log that `done` ranks are done; each of the others is taken to last as long."""
        left = ""
        if done:
            left_s = (time.monotonic() - self._start_s) / done * (self._total - done)
            left = f", about {left_s:.0f} s left"
        PROGRESS.info(f"{done} of {self._total} {self._words}{left}")


def _rehearse_beside_others(plan: Plan, traces: TraceFolder | None, rank: int) -> RankRehearsal:
    """Rehearse a rank with the results of earlier ranks of this process."""
    plan, known = _of_this_process(plan)
    return rehearse_rank(plan, rank, known=known, traces=traces)


@lru_cache(maxsize=1)
def _of_this_process(plan: Plan) -> tuple[Plan, KnownResults]:
    """Return the first equal plan of this process, and the results of its earlier ranks.

    Values that are derived of a plan, such as its schedule, are kept for the first one.
    """
    return plan, KnownResults()


def _faults_of(rank: RankRehearsal) -> Iterator[_Found]:
    """Yield what is wrong with one rank, each thing once."""
    yield from ((_RULES[one.rule], one.text) for one in rank.misuses)
    reads = (
        one
        for one in rank.entries
        if isinstance(one, HostRead) and one.task and one.what not in _UNAVOIDABLE
    )
    told = dict.fromkeys(
        f"the host waits for {one.operation} at {one.where}, in an action {one.task}"
        for one in reads
    )
    yield from ((rules.REHEARSE_HOST_READ, text) for text in told)


def _alike(one: Sequence[Entry], other: Sequence[Entry]) -> bool:
    """Return whether two ranks of a class do the same, each with members of its own."""
    if one is other:
        return True
    return len(one) == len(other) and all(_is_same(a, b) for a, b in zip(one, other, strict=True))


def _is_same(one: Entry, other: Entry) -> bool:
    """Return whether two entries are of one call of a class: messages name their other end."""
    if not isinstance(one, Issue) or not isinstance(other, Issue):
        return one == other
    return _of_class(one) == _of_class(other)


def _of_class(one: Issue) -> tuple[object, ...]:
    name = "" if one.kind == RECEIVE else one.name
    what = (one.communicator, len(one.members), one.kind, name)
    return (*what, one.data_of_class, one.num_bytes, one.dtype, one.task, one.opens)
