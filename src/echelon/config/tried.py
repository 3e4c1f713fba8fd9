"""Settings that do work, for errors to suggest: each is tried before it is named.

A suggestion is kept where the fault that it is to mend is gone and no other one has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from echelon.config.checks import CHECKS, run_checks
from echelon.config.cluster import read_cluster
from echelon.config.context import (
    DEGREE_KEY,
    KIND_KEY,
    LENGTH_KEY,
    cuts_groups,
    cuts_heads,
    cuts_sequence,
    idle_settings,
)
from echelon.config.entries import Entry
from echelon.config.expert_checks import EXPERT_FAULTS
from echelon.config.faults import Changes, Fault, Find
from echelon.config.kinds import toml_text
from echelon.config.model import MODEL_CHECKS
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.view import Unavailable, View, mesh_of
from echelon.config.zero import ZERO_CHECKS
from echelon.core.cluster import Cluster
from echelon.core.errors import Problem
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.context import (
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)
from echelon.core.rulebook.mesh import FITS_CLUSTER

MOST_NAMED = 2
MOST_TRIED = 64

Broken = tuple[str, str]
"""A rule that is broken, and the setting that it is about."""


def that_work(
    view: View, changes: Iterable[Changes], limit: int = 100, mend: Broken | None = None
) -> list[str]:
    """Return the first of `changes` that mend something and break nothing, as they are set.

    With `mend` they mend that: what mends another fault only is no advice about this one.
    """
    before = _broken(view)
    wanted: set[Broken] = set() if mend is None else {mend}
    return list(
        islice(
            (
                " with ".join(f"{key} = {toml_text(value)}" for key, value in change.items())
                for change in islice(changes, MOST_TRIED)
                if (after := _broken(_changed(view, change))) < before and not after & wanted
            ),
            limit,
        )
    )


def tell(view: View, fault: Fault) -> Problem:
    """Return the problem of a fault, with the changes that do mend it."""
    mend = fault.rule.id, fault.key
    works = [text for way in fault.ways for text in that_work(view, way, MOST_NAMED, mend)]
    return fault.rule.problem(
        fault.message,
        key=fault.key,
        set_by=view.set_by(fault.key, *fault.others),
        works=dict.fromkeys(works),
    )


def telling(find: Find) -> Callable[[View], Iterator[Problem]]:
    """Return the check that tells the faults that `find` finds."""
    return lambda view: (tell(view, fault) for fault in find(view))


EXPERT_CHECKS = tuple(telling(find) for find in EXPERT_FAULTS)


def _changed(view: View, change: Changes) -> View:
    entries = {key: Entry(value=value, source="") for key, value in change.items()}
    return replace(view, entries={**view.entries, **entries})


def _broken(view: View) -> frozenset[Broken]:
    checks = (*MODEL_CHECKS, *CHECKS, *ZERO_CHECKS)
    found = {(problem.rule, problem.key) for problem in run_checks(view, checks)}
    for find in (_misfits, _idle, _too_many_ranks, *map(_faults, EXPERT_FAULTS)):
        found.update(_where_known(find, view))
    return frozenset(found)


def _where_known(find: Callable[[View], Iterable[Broken]], view: View) -> Iterator[Broken]:
    try:
        yield from find(view)
    except Unavailable:
        return


def _faults(find: Find) -> Callable[[View], Iterable[Broken]]:
    return lambda view: ((fault.rule.id, fault.key) for fault in find(view))


def _misfits(view: View) -> Iterator[Broken]:
    if not cuts_groups(view):
        yield ULYSSES_DIVIDES_CP.id, DEGREE_KEY
        return
    if not cuts_heads(view):
        yield ULYSSES_DIVIDES_HEADS.id, KIND_KEY
    if not cuts_sequence(view):
        yield CONTEXT_DIVIDES_SEQUENCE.id, LENGTH_KEY


def _idle(view: View) -> Iterator[Broken]:
    return ((NO_EFFECT.id, key) for key in idle_settings(view))


def _too_many_ranks(view: View) -> Iterator[Broken]:
    if not any(map(view.has, CLUSTER_SOURCES)):
        return
    cluster = read_cluster(view)
    if isinstance(cluster, Cluster) and mesh_of(view).world_size > cluster.num_devices:
        yield FITS_CLUSTER.id, "mesh"
