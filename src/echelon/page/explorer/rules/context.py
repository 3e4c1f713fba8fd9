# SPDX-License-Identifier: Apache-2.0
"""What ways to meet over context ranks need, and settings of recompute that change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.mesh import ULYSSES_DIVIDES_CP, ULYSSES_DIVIDES_HEADS
from echelon.page.explorer.controls import OPERATORS, PLAIN, Controls, Record
from echelon.page.explorer.inputs import exchanging_ranks
from echelon.page.explorer.rules.broken import Broken, rest_text, without_effect


def cuts_groups(tables: Record, controls: Controls) -> bool:
    """Return whether groups that exchange heads are equal parts of the context ranks."""
    cp, kind = controls.cp, tables["context_kinds"][controls.context]
    return cp == 1 or kind["exchange"] != "inner" or cp % controls.ulysses == 0


def broken_by_context(tables: Record, controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield what a kind of context needs of heads, and a kind without context ranks."""
    cp, name, degree = controls.cp, controls.context, controls.ulysses
    kind = tables["context_kinds"][name]
    exchange = kind["exchange"]
    if not cuts_groups(tables, controls):
        yield Broken(
            rule=ULYSSES_DIVIDES_CP.id,
            message=f"{degree} ranks that exchange heads do not divide cp = {cp} "
            f"({rest_text(cp, degree)})",
        )
    # A kind without a choice of ranks has a plan's own degree of 1, or all of them.
    if exchange == "all" and degree != 1 and cp > 1 and degree != cp:
        yield Broken(
            rule=ULYSSES_DIVIDES_CP.id,
            message=f"{degree} ranks that exchange heads, but {name} exchanges them among all of "
            f"cp = {cp}",
        )
    if shape.heads % controls.tp == 0 and cuts_groups(tables, controls):
        heads, ranks = shape.heads // controls.tp, exchanging_ranks(kind, controls)
        if heads % ranks:
            yield Broken(
                rule=ULYSSES_DIVIDES_HEADS.id,
                message=f"{name} shares out heads among {ranks} ranks, but heads / tp = "
                f"{shape.heads} / {controls.tp} = {heads} ({rest_text(heads, ranks)})",
            )
    yield from without_effect(
        cp == 1 and name != PLAIN["context"], f"{name} is how cp works, and cp = 1"
    )
    yield from without_effect(
        exchange == "none" and degree != 1, f"{name} exchanges no heads, among {degree} ranks"
    )


def broken_by_recompute(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield an interval without full recompute, and operators that change nothing."""
    policy, every, named = controls.recompute, controls.every, controls.operators
    yield from without_effect(
        policy != "full" and every != 1, f"every {every} counts blocks of full recompute"
    )
    if named == "auto":
        return
    if policy == "none" or (policy == "full" and every == 1):
        why = "nothing runs again" if policy == "none" else "every block runs again whole"
        yield Broken(rule=NO_EFFECT.id, message=f"{named} changes nothing: {why}")
        return
    operators = OPERATORS[named]
    for operator in operators:
        why = _lost(operator, operators, shape)
        if why != "":
            yield Broken(
                rule=NO_EFFECT.id, message=f"{operator} to run again changes nothing: {why}"
            )


def _lost(operator: str, operators: tuple[str, ...], shape: ModelShape) -> str:
    """Return why an operator is not one that runs again, "" where it is."""
    if operator == "attention" and shape.latent is not None:
        return "latent attention does not run again by itself"
    if operator in ("activation", "mlp") and not shape.has_dense_blocks:
        return "no block has an MLP that every token meets alone"
    if operator == "activation" and "mlp" in operators:
        return "it is a part of mlp"
    return ""
