"""Settings of context parallelism that do work, for errors to suggest: each is tried before.

A suggestion is kept where the fault that it is to mend is gone and no other one has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import cast

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
from echelon.config.kinds import Choice, toml_text
from echelon.config.schema import SETTINGS
from echelon.config.view import Unavailable, View, mesh_of
from echelon.config.zero import ZERO_CHECKS
from echelon.core.cluster import Cluster
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.context import (
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)
from echelon.core.rulebook.mesh import FITS_CLUSTER

KINDS = cast(Choice, SETTINGS[KIND_KEY].kind).options

Changes = Mapping[str, object]
Fault = tuple[str, str]
"""A rule that is broken, and the setting that it is about."""


def that_work(view: View, changes: Iterable[Changes], limit: int = len(KINDS)) -> list[str]:
    """Return the first of `changes` that mend something and break nothing, as they are set."""
    before = _faults(view)
    return list(
        islice(
            (
                " with ".join(f"{key} = {toml_text(value)}" for key, value in change.items())
                for change in changes
                if _faults(_changed(view, change)) < before
            ),
            limit,
        )
    )


def other_kinds(view: View) -> Iterator[Changes]:
    """Yield every other way in which context ranks may meet."""
    for kind in KINDS:
        if kind != view.word(KIND_KEY):
            yield with_free_degree(view, {KIND_KEY: kind})


def with_free_degree(view: View, change: Changes) -> Changes:
    """Return a change that also leaves a degree to us where it is set."""
    return change if view.is_default(DEGREE_KEY) else {**change, DEGREE_KEY: "auto"}


def by_distance(numbers: Iterable[int], wanted: int) -> list[int]:
    """Return other numbers, those nearest to `wanted` first."""
    return sorted((n for n in numbers if n != wanted), key=lambda n: (abs(n - wanted), n))


def _changed(view: View, change: Changes) -> View:
    entries = {key: Entry(value=value, source="") for key, value in change.items()}
    return replace(view, entries={**view.entries, **entries})


def _faults(view: View) -> frozenset[Fault]:
    found = {(p.rule, p.key) for p in run_checks(view, (*CHECKS, *ZERO_CHECKS))}
    for find in (_misfits, _idle, _too_many_ranks):
        found.update(_where_known(find, view))
    return frozenset(found)


def _where_known(find: Callable[[View], Iterable[Fault]], view: View) -> Iterator[Fault]:
    try:
        yield from find(view)
    except Unavailable:
        return


def _misfits(view: View) -> Iterator[Fault]:
    if not cuts_groups(view):
        yield ULYSSES_DIVIDES_CP.id, DEGREE_KEY
        return
    if not cuts_heads(view):
        yield ULYSSES_DIVIDES_HEADS.id, KIND_KEY
    if not cuts_sequence(view):
        yield CONTEXT_DIVIDES_SEQUENCE.id, LENGTH_KEY


def _idle(view: View) -> Iterator[Fault]:
    return ((NO_EFFECT.id, key) for key in idle_settings(view))


def _too_many_ranks(view: View) -> Iterator[Fault]:
    cluster = read_cluster(view)
    if isinstance(cluster, Cluster) and mesh_of(view).world_size > cluster.num_devices:
        yield FITS_CLUSTER.id, "mesh"
