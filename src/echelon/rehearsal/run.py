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
from itertools import chain

import torch

from echelon.core.plan import Plan
from echelon.core.rulebook import rehearse as rules
from echelon.core.rules import Rule
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.cost.peak.few_rounds import with_few_microbatches
from echelon.cost.peak.rank_peak import PeakWalk
from echelon.rehearsal.classes import RankClasses
from echelon.rehearsal.in_flight import MISSING_WAIT, NEVER_AWAITED, RELEASED_IN_FLIGHT
from echelon.rehearsal.log import RECEIVE, Entry, HostRead, Issue
from echelon.rehearsal.order import DEADLOCK, MISMATCH, MISSING, RankClass, prove_order
from echelon.rehearsal.rank import RankRehearsal, rehearse_rank
from echelon.rehearsal.result import Rehearsal, RehearsalFault

_RULES: Mapping[str, Rule] = {
    DEADLOCK: rules.REHEARSE_DEADLOCK,
    MISMATCH: rules.REHEARSE_MISMATCH,
    MISSING: rules.REHEARSE_MISSING,
    MISSING_WAIT: rules.REHEARSE_MISSING_WAIT,
    RELEASED_IN_FLIGHT: rules.REHEARSE_RELEASED_IN_FLIGHT,
    NEVER_AWAITED: rules.REHEARSE_NEVER_AWAITED,
}

_Found = tuple[Rule, str]
"""A rule that is broken, and how."""


def on_nccl(plan: Plan) -> Plan:
    """Return a plan as it is on GPUs: one for a CPU adds up its sums itself, and offloads apart."""
    return replace(plan, cluster=replace(plan.cluster, backend="nccl"))


def rehearse(plan: Plan, *, workers: int | None = None, whole: bool = False) -> Rehearsal:
    """Rehearse every distinct rank of `plan`, in `workers` processes (default: one per core).

    Steps have few microbatches (`with_few_microbatches`), or with `whole` all of them.
    """
    started = time.perf_counter()
    num_microbatches = plan.num_microbatches
    plan = on_nccl(plan) if whole else with_few_microbatches(on_nccl(plan))
    logs: dict[RankClass, Sequence[Entry]] = {}
    ranks: list[RankRehearsal] = []
    found: dict[_Found, list[int]] = {}
    classes, checked, rehearsed = _in_classes(plan, workers or os.cpu_count() or 1)
    for one in rehearsed:
        log = logs.setdefault(classes.of(one.rank), one.entries)
        if one.rank not in checked:
            ranks.append(replace(one, entries=()))
            for fault in _faults_of(one):
                found.setdefault(fault, []).append(one.rank)
        if not _alike(log, one.entries):
            text = f"this rank does other things than its class {classes.of(one.rank)}"
            found.setdefault((rules.REHEARSE_CLASS, text), []).append(one.rank)
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
        sent={one.rank: bytes_sent_by_axis(plan, one.rank) for one in ranks},
        seconds=time.perf_counter() - started,
    )


def _in_classes(
    plan: Plan, workers: int
) -> tuple[RankClasses, Sequence[int], Iterable[RankRehearsal]]:
    """Return the classes, the ranks that are compared with theirs, and all that are rehearsed.

    Context ranks are classes of their own where those of the first stage differ.
    """
    contexts = list(_rehearsed(plan, RankClasses(plan).context_ranks(), workers))
    apart = any(not _alike(contexts[0].entries, one.entries) for one in contexts)
    classes = RankClasses(plan, by_context=apart)
    checked, known = classes.checked(), {one.rank for one in contexts}
    rest = [one for one in (*classes.first_ranks(), *checked) if one not in known]
    return (
        classes,
        [one for one in checked if one not in known],
        chain(contexts, _rehearsed(plan, rest, workers)),
    )


def _rehearsed(plan: Plan, ranks: Sequence[int], workers: int) -> Iterator[RankRehearsal]:
    """Yield what each rank did, in their order."""
    if len(ranks) < 2 or workers == 1:
        yield from (rehearse_rank(plan, rank) for rank in ranks)
        return
    fork = multiprocessing.get_context("fork")
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(min(workers, len(ranks)), fork, **one_thread) as processes:
        yield from processes.map(rehearse_rank, [plan] * len(ranks), ranks)


def _faults_of(rank: RankRehearsal) -> Iterator[_Found]:
    """Yield what is wrong with one rank, each thing once."""
    yield from ((_RULES[one.rule], one.text) for one in rank.misuses)
    reads = (one for one in rank.entries if isinstance(one, HostRead) and one.task)
    told = dict.fromkeys(
        f"the host waits for {one.operation} at {one.where}, in an action {one.task}"
        for one in reads
    )
    yield from ((rules.REHEARSE_HOST_READ, text) for text in told)


def _alike(one: Sequence[Entry], other: Sequence[Entry]) -> bool:
    """Return whether two ranks of a class do the same, each with members of its own."""
    return len(one) == len(other) and all(
        _without_members(a) == _without_members(b) for a, b in zip(one, other, strict=True)
    )


def _without_members(entry: Entry) -> Entry:
    """Return an entry as it is for all ranks of a class: messages name their other end."""
    if not isinstance(entry, Issue):
        return entry
    name = "" if entry.kind == RECEIVE else entry.name
    return replace(entry, members=(len(entry.members),), name=name)
