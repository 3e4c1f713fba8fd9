# SPDX-License-Identifier: Apache-2.0
"""What context parallelism needs: parts of a sequence and shares of heads that come out even."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.context import (
    ATTENTION_KEY,
    CP_KEY,
    DEGREE_KEY,
    KIND_KEY,
    LENGTH_KEY,
    cuts_groups,
    cuts_heads,
    cuts_sequence,
    pieces_with_tensor_ranks,
    query_heads,
    ring_degree,
    ulysses_degree,
)
from echelon.config.rules.violations import (
    RuleViolation,
    SettingChanges,
    Trial,
    near_divisors,
    setting_changes,
    setting_without_effect,
)
from echelon.config.view import View
from echelon.core.choices.context_kinds import CONTEXT_KINDS, kinds_with_degree
from echelon.core.choices.kernels import ATTENTION_KERNELS, AttendedRun, misfits
from echelon.core.rulebook.mesh import (
    ATTENTION_KERNEL_TAKES,
    CONTEXT_DIVIDES_SEQUENCE,
    ULYSSES_DIVIDES_CP,
    ULYSSES_DIVIDES_HEADS,
)
from echelon.core.settings.value_types import toml_text


def context_divides_sequence(view: View) -> Iterator[RuleViolation]:
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
    yield RuleViolation(
        rule=CONTEXT_DIVIDES_SEQUENCE,
        message=f"{LENGTH_KEY} = {length} is not a multiple of {why}",
        key=LENGTH_KEY,
        set_by=(LENGTH_KEY, CP_KEY, KIND_KEY, DEGREE_KEY),
        suggestions=(
            setting_changes(LENGTH_KEY, (n for n in (below, below + step) if n)),
            (_with_automatic_degree(view, {CP_KEY: n}) for n in near_divisors(length, cp)),
            _other_kinds,
        ),
    )


def ulysses_divides_cp(view: View) -> Iterator[RuleViolation]:
    """Check that groups which exchange heads are equal parts of the context ranks."""
    if cuts_groups(view):
        return
    cp, kind, degree = view.integer(CP_KEY), view.word(KIND_KEY), view.integer(DEGREE_KEY)
    exchange = CONTEXT_KINDS[kind].exchange
    if exchange == "none":
        why = f'but "{kind}" exchanges no heads among {CP_KEY} = {cp}'
    elif exchange == "all":
        why = f'but "{kind}" exchanges heads among all of {CP_KEY} = {cp}'
    else:
        why = f"which does not divide {CP_KEY} = {cp} ({cp} % {degree} = {cp % degree})"
    yield RuleViolation(
        rule=ULYSSES_DIVIDES_CP,
        message=f"{DEGREE_KEY} = {degree}, {why}",
        key=DEGREE_KEY,
        set_by=(DEGREE_KEY, CP_KEY, KIND_KEY),
        suggestions=(
            setting_changes(DEGREE_KEY, near_divisors(cp, degree)),
            _kinds_with_degree,
            lambda trial: trial.first(setting_changes(CP_KEY, (degree, 2 * degree)), 1),
        ),
    )


def ulysses_divides_heads(view: View) -> Iterator[RuleViolation]:
    """Check that every rank of an exchange gets an equal share of the query heads."""
    if cuts_heads(view):
        return
    heads, (degree, _) = query_heads(view), ulysses_degree(view)
    kind, tp, total = view.word(KIND_KEY), view.integer("mesh.tp"), view.integer("model.heads")
    among_all = CONTEXT_KINDS[kind].exchange == "all"
    yield RuleViolation(
        rule=ULYSSES_DIVIDES_HEADS,
        message=f"{KIND_KEY} = {toml_text(kind)} shares out heads among {degree} ranks, but "
        f"{view.model_name} has heads / tp = {total} / {tp} = {heads} on a tensor rank "
        f"({heads} % {degree} = {heads % degree})",
        key=CP_KEY if among_all else DEGREE_KEY,
        set_by=(DEGREE_KEY, CP_KEY, KIND_KEY, "model.heads", "mesh.tp"),
        suggestions=(_shares_of_heads(view, heads, degree, among_all), _other_kinds),
    )


def _shares_of_heads(
    view: View, heads: int, degree: int, among_all: bool
) -> Iterator[SettingChanges]:
    """Return degrees of an exchange that divide heads, the nearest first."""
    shared = near_divisors(heads, degree)
    if among_all:
        return (_with_automatic_degree(view, {CP_KEY: n}) for n in shared)
    return setting_changes(DEGREE_KEY, shared)


def attention_kernel_takes(view: View) -> Iterator[RuleViolation]:
    """Check that the kernel that is asked for takes the dtypes and heads, and that it is there."""
    kernel = view.word(ATTENTION_KEY)
    if kernel == "auto":
        return
    capped = view.has("model.soft_cap") and view.value("model.soft_cap") not in (None, "none")
    run = AttendedRun(
        backend=cluster_of(view).backend,
        dtype=view.word("precision.parameters"),
        head_dim=view.integer("model.head_dim"),
        soft_cap=capped,
    )
    reasons = misfits(kernel, run)
    if reasons:
        works = ["auto", *(name for name in ATTENTION_KERNELS if not misfits(name, run))]
        yield RuleViolation(
            rule=ATTENTION_KERNEL_TAKES,
            message=f"{ATTENTION_KEY} = {toml_text(kernel)}, but {', and '.join(reasons)}",
            key=ATTENTION_KEY,
            set_by=(ATTENTION_KEY, "precision.parameters", "model.head_dim", "model.soft_cap"),
            suggestions=(
                lambda trial: trial.first(setting_changes(ATTENTION_KEY, works), len(works)),
            ),
        )


def context_kind_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find how context ranks meet where there is one."""
    if view.integer(CP_KEY) == 1:
        why = "it is how cp works, and mesh.cp = 1"
        yield from setting_without_effect(view, KIND_KEY, why, {CP_KEY: 2})


def ulysses_degree_without_effect(view: View) -> Iterator[RuleViolation]:
    """Find a degree where no heads move."""
    kind = view.word(KIND_KEY)
    if CONTEXT_KINDS[kind].exchange == "none":
        why = f"{kind} exchanges no heads"
        yield from setting_without_effect(view, DEGREE_KEY, why, _kinds_with_degree, allowed=(1,))


def _other_kinds(trial: Trial) -> list[str]:
    """Return every other way in which context ranks may meet."""
    others = [kind for kind in CONTEXT_KINDS if kind != trial.view.word(KIND_KEY)]
    changes = (_with_automatic_degree(trial.view, {KIND_KEY: kind}) for kind in others)
    return trial.first(changes, len(others))


def _kinds_with_degree(trial: Trial) -> list[str]:
    kinds = kinds_with_degree()
    return trial.first(setting_changes(KIND_KEY, kinds), len(kinds))


def _with_automatic_degree(view: View, change: SettingChanges) -> SettingChanges:
    """Return a change that also leaves a degree to us where it is set."""
    return change if view.is_default(DEGREE_KEY) else {**change, DEGREE_KEY: "auto"}


CONTEXT_FINDERS = (
    context_divides_sequence,
    ulysses_divides_cp,
    ulysses_divides_heads,
    attention_kernel_takes,
)
CONTEXT_EFFECT_FINDERS = (context_kind_without_effect, ulysses_degree_without_effect)
