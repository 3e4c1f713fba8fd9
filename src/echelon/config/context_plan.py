"""What is wrong with how a plan cuts its sequences, whoever made the plan.

What `ec.plan` makes has been checked with its settings (`config/context_checks.py`). A plan may
also be read from a file, or changed in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import get_args

from echelon.config.kinds import Choice, Flag, Integer, Kind, Real, toml_text
from echelon.core.errors import Problem
from echelon.core.plan import ContextKind, Documents, Plan
from echelon.core.rulebook.context import (
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)
from echelon.core.rulebook.mesh import SEQUENCE_PARALLEL_DIVIDES_SEQUENCE
from echelon.core.rules import nearest_divisors

VALUES: tuple[tuple[str, Kind, tuple[object, ...]], ...] = (
    ("model.causal", Flag(), ()),
    ("model.window", Integer(), (None,)),
    ("model.soft_cap", Real(above=True), (50.0, None)),
    ("batch.documents", Choice(options=get_args(Documents)), ()),
    ("context.kind", Choice(options=get_args(ContextKind)), ()),
)
"""What decides who meets whom: the key, what it takes, and values that work beside its own."""


def context_problems(plan: Plan) -> Iterator[Problem]:
    """Yield every problem of a plan's mask, of its context ranks, their sequences and heads."""
    wrong = list(_value_problems(plan))
    yield from wrong or _cut_problems(plan)


def _value_problems(plan: Plan) -> Iterator[Problem]:
    model = plan.model
    found: dict[str, object] = {
        "model.causal": model.causal,
        "model.window": model.window,
        "model.soft_cap": model.soft_cap,
        "batch.documents": plan.mathematics.documents,
        "context.kind": plan.layout.context.kind,
    }
    for key, kind, works in VALUES:
        value = found[key]
        misfit = None if value is None and None in works else kind.misfit(value)
        if misfit is not None:
            yield misfit.rule.problem(
                f"{key} = {toml_text(value)} {misfit.message}"
                + (" or None" if None in works else ""),
                key=key,
                works=(*misfit.works, *works),
            )


def _cut_problems(plan: Plan) -> Iterator[Problem]:
    context, cp, tp = plan.layout.context, plan.mesh.cp, plan.mesh.tp
    kind, degree = context.kind, context.ulysses_degree
    wanted = {"ulysses": cp, "ulysses-ring": degree}.get(kind, 1)
    if degree != wanted or degree < 1 or cp % degree:
        yield ULYSSES_DIVIDES_CP.problem(
            f"context.ulysses_degree = {degree} with context.kind = {kind!r} and cp = {cp}",
            key="context.ulysses_degree",
            works=(wanted,) if kind != "ulysses-ring" else nearest_divisors(cp, degree),
        )
        return
    length = plan.mathematics.sequence_length
    ring = cp // degree
    chunks = 2 * ring if kind != "striped" and ring > 1 else 1
    count, what = cp, f"cp = {cp}"
    if length % cp == 0:
        count, what = chunks, f"the {chunks} chunks of a ring of {ring}"
    if length % count:
        step = lcm(cp, chunks)
        yield CONTEXT_DIVIDES_SEQUENCE.problem(
            f"sequence_length = {length} is not a multiple of {what} ({length} % {count} = "
            f"{length % count})",
            key="batch.sequence_length",
            works=[n for n in (length - length % step, length - length % step + step) if n],
        )
    if plan.layout.sequence_parallel and length % cp == 0 and length // cp % tp:
        yield SEQUENCE_PARALLEL_DIVIDES_SEQUENCE.problem(
            f"tp = {tp} cuts the {length // cp} positions of a context rank ({length // cp} % {tp} "
            f"= {length // cp % tp})",
            key="batch.sequence_length",
            works=[n for n in (length - length % (cp * tp), length + -length % (cp * tp)) if n],
        )
    heads = plan.model.heads // tp
    if heads % degree:
        yield ULYSSES_DIVIDES_HEADS.problem(
            f"{degree} ranks share out the {heads} heads of a tensor rank ({heads} % {degree} = "
            f"{heads % degree})",
            key="context.ulysses_degree",
            works=nearest_divisors(heads, degree),
        )
