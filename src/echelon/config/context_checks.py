"""What context parallelism needs: parts of a sequence and shares of heads that come out even."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.context import (
    CP_KEY,
    DEGREE_KEY,
    KIND_KEY,
    LENGTH_KEY,
    cuts_groups,
    cuts_heads,
    cuts_sequence,
    idle_settings,
    pieces_with_tensor_ranks,
    query_heads,
    ring_degree,
    ulysses_degree,
)
from echelon.config.context_works import other_kinds, with_free_degree
from echelon.config.faults import by_distance
from echelon.config.kinds import toml_text
from echelon.config.refusals import no_effect
from echelon.config.tried import MOST_NAMED, that_work
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.rulebook.context import (
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)
from echelon.core.rules import nearest_divisors


def context_divides_sequence(view: View) -> Iterator[Problem]:
    """Check that every context rank gets an equal part of a sequence."""
    if cuts_sequence(view):
        return
    length, cp, kind = view.integer(LENGTH_KEY), view.integer(CP_KEY), view.word(KIND_KEY)
    if length % cp:
        why = f"{CP_KEY} = {cp} ({length} % {cp} = {length % cp})"
    else:
        ring = ring_degree(view)
        why = f"2 x {ring}: {kind} cuts it into two chunks for each of {ring} places of a ring "
        why += f"({length} % {2 * ring} = {length % (2 * ring)})"
    step = pieces_with_tensor_ranks(view)
    below = length - length % step
    degrees = by_distance(nearest_divisors(length, cp, limit=length), cp)
    yield CONTEXT_DIVIDES_SEQUENCE.problem(
        f"{LENGTH_KEY} = {length} is not a multiple of {why}",
        key=LENGTH_KEY,
        set_by=view.set_by(LENGTH_KEY, CP_KEY, KIND_KEY, DEGREE_KEY),
        works=[
            *that_work(view, ({LENGTH_KEY: n} for n in (below, below + step) if n)),
            *that_work(view, (with_free_degree(view, {CP_KEY: n}) for n in degrees), MOST_NAMED),
            *that_work(view, other_kinds(view)),
        ],
    )


def ulysses_divides_cp(view: View) -> Iterator[Problem]:
    """Check that groups which exchange heads are equal parts of the context ranks."""
    if cuts_groups(view):
        return
    cp, kind, degree = view.integer(CP_KEY), view.word(KIND_KEY), view.integer(DEGREE_KEY)
    if kind == "ulysses":
        why = f'but "ulysses" exchanges heads among all of {CP_KEY} = {cp}'
    else:
        why = f"which does not divide {CP_KEY} = {cp} ({cp} % {degree} = {cp % degree})"
    degrees = by_distance(nearest_divisors(cp, degree, limit=cp), degree)
    yield ULYSSES_DIVIDES_CP.problem(
        f"{DEGREE_KEY} = {degree}, {why}",
        key=DEGREE_KEY,
        set_by=view.set_by(DEGREE_KEY, CP_KEY, KIND_KEY),
        works=[
            *that_work(view, ({DEGREE_KEY: n} for n in degrees), MOST_NAMED),
            *that_work(view, [{KIND_KEY: "ulysses-ring"}]),
            *that_work(view, ({CP_KEY: n} for n in (degree, 2 * degree)), 1),
        ],
    )


def ulysses_divides_heads(view: View) -> Iterator[Problem]:
    """Check that every rank of an exchange gets an equal share of the query heads."""
    if cuts_heads(view):
        return
    heads, (degree, _) = query_heads(view), ulysses_degree(view)
    kind, tp, total = view.word(KIND_KEY), view.integer("mesh.tp"), view.integer("model.heads")
    shared = by_distance(nearest_divisors(heads, degree, limit=heads), degree)
    if kind == "ulysses":
        degrees = [with_free_degree(view, {CP_KEY: n}) for n in shared]
    else:
        degrees = [{DEGREE_KEY: n} for n in shared]
    yield ULYSSES_DIVIDES_HEADS.problem(
        f"{KIND_KEY} = {toml_text(kind)} shares out heads among {degree} ranks, but "
        f"{view.model_name} has heads / tp = {total} / {tp} = {heads} on a tensor rank "
        f"({heads} % {degree} = {heads % degree})",
        key=CP_KEY if kind == "ulysses" else DEGREE_KEY,
        set_by=view.set_by(DEGREE_KEY, CP_KEY, KIND_KEY, "model.heads", "mesh.tp"),
        works=[*that_work(view, degrees, MOST_NAMED), *that_work(view, other_kinds(view))],
    )


def context_effects(view: View) -> Iterator[Problem]:
    """Yield how context ranks meet where there is one, and a degree where no heads move."""
    idle = idle_settings(view)
    if KIND_KEY in idle:
        works = that_work(view, [{CP_KEY: 2}])
        yield from no_effect(view, KIND_KEY, "it is how cp works, and mesh.cp = 1", works)
    if DEGREE_KEY in idle:
        works = that_work(view, [{KIND_KEY: "ulysses-ring"}])
        why = f"{view.word(KIND_KEY)} exchanges no heads"
        yield from no_effect(view, DEGREE_KEY, why, works)


CONTEXT_CHECKS = (
    context_divides_sequence,
    ulysses_divides_cp,
    ulysses_divides_heads,
    context_effects,
)
