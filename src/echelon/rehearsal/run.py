# SPDX-License-Identifier: Apache-2.0
"""A whole plan, rehearsed: one rank of each class, the order of all, and what the plan said.

The ranks are rehearsed in processes of this machine, a few at a time; none talks to another.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import torch

from echelon.core.errors import InfeasiblePlan
from echelon.core.messages.notes import PROGRESS
from echelon.core.plan import Plan
from echelon.core.rulebook import planner as rules
from echelon.core.rulebook.servers import ASYNCHRONOUS_ORDER_IS_NOT_KNOWN
from echelon.core.rules import Rule
from echelon.cost.peak.rank_peak import PeakWalk, with_few_microbatches
from echelon.parallel.expert.token_dispatcher import ROWS_OF_EXPERTS
from echelon.rehearsal.classes import RankClasses
from echelon.rehearsal.in_flight import MISSING_WAIT, NEVER_AWAITED, RELEASED_IN_FLIGHT
from echelon.rehearsal.log import RECEIVE, Entry, HostRead, Issue
from echelon.rehearsal.order import DEADLOCK, MISMATCH, MISSING, RankClass, prove_order
from echelon.rehearsal.rank import (
    RankRehearsal,
    planned_bytes,
    rehearse_ranks,
    with_short_rounds,
)
from echelon.rehearsal.result import Rehearsal, RehearsalFault
from echelon.rehearsal.roofline import roofline_of_plan
from echelon.rehearsal.tracing.traces import TraceFolder

_PARTS_PER_PROCESS = 3
"""A process rehearses its ranks in so many parts; those of one share what is known of shapes."""

_RULES: Mapping[str, Rule] = {
    DEADLOCK: rules.REHEARSE_DEADLOCK,
    MISMATCH: rules.REHEARSE_MISMATCH,
    MISSING: rules.REHEARSE_MISSING,
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
        for number, one in enumerate(rehearsed, 1):
            PROGRESS.info(f"{number} ranks rehearsed, each for all that are like it")
            log = logs.setdefault(classes.of(one.rank), one.entries)
            if one.rank not in checked:
                ranks.append(replace(one, entries=()))
                for fault in _faults_of(one):
                    found.setdefault(fault, []).append(one.rank)
            if not _alike(log, one.entries):
                text = f"this rank does other things than its class {classes.of(one.rank)}"
                found.setdefault((rules.REHEARSE_CLASS, text), []).append(one.rank)
    PROGRESS.info("checking that the operations of all ranks have one order")
    proof = prove_order(logs, classes.of)
    found |= {(_RULES[fault.rule], fault.text): [] for fault in proof.faults}
    walk = PeakWalk(plan)
    return Rehearsal(
        plan=plan,
        num_microbatches=num_microbatches,
        ranks=tuple(ranks),
        checked=tuple(checked),
        faults=tuple(
            RehearsalFault(rule=rule, ranks=tuple(where), text=text)
            for (rule, text), where in found.items()
        ),
        num_operations=proof.num_operations,
        planned={one.rank: walk.peak(one.rank).terms for one in ranks},
        sent={one.rank: planned_bytes(plan, one.rank) for one in ranks},
        seconds=time.perf_counter() - started,
        roofline=None if asked.cluster.backend == "gloo" else roofline_of_plan(asked, plan, ranks),
    )


def _in_classes(
    plan: Plan, processes: _Processes, folder: TraceFolder | None
) -> tuple[RankClasses, Sequence[int], Iterable[RankRehearsal]]:
    """Return the classes, the ranks that are compared with theirs, and all that are rehearsed.

    Context ranks are classes of their own where those of the first stage differ.
    """
    contexts = list(processes.rehearse(plan, RankClasses(plan).context_ranks(), folder))
    apart = any(not _alike(contexts[0].entries, one.entries) for one in contexts)
    classes = RankClasses(plan, by_context=apart)
    checked, known = classes.checked(), {one.rank for one in contexts}
    first = [one for one in classes.first_ranks() if one not in known]
    checked = [one for one in checked if one not in known]
    if folder is not None:
        folder = replace(folder, left_out=frozenset(checked))
    rest = processes.rehearse(plan, [*first, *checked], folder)
    return classes, checked, chain(contexts, rest)


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
        self, plan: Plan, ranks: Sequence[int], traces: TraceFolder | None
    ) -> Iterator[RankRehearsal]:
        """Yield what each rank did, in their order."""
        if len(ranks) < 2 or self._count == 1:
            yield from rehearse_ranks(plan, ranks, traces)
            return
        if self._executor is None:
            fork = multiprocessing.get_context("fork")
            # Processes of the calling program are not ours to kill.
            self._others = {process.pid for process in multiprocessing.active_children()}
            one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
            self._executor = ProcessPoolExecutor(self._count, fork, **one_thread)
        size = -(-len(ranks) // (self._count * _PARTS_PER_PROCESS))
        parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        yield from chain.from_iterable(
            self._executor.map(partial(rehearse_ranks, plan, traces=traces), parts)
        )


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
    return (*what, one.num_bytes, one.dtype, one.task, one.opens)
