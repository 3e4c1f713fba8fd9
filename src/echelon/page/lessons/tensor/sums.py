# SPDX-License-Identifier: Apache-2.0
"""What lessons about tensor ranks have in common: ranks as boxes, weights and bytes as facts."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.plan import DTYPE_BYTES
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.page.document import Fact
from echelon.page.lessons.diagram import Place, Tile
from echelon.page.lessons.lesson import LessonControl

EVERYWHERE = 0
"""The kind of what every rank has whole; rank r's own parts are of kind r + 1."""
BYTES = DTYPE_BYTES["bf16"]
"""Bytes of a number in these lessons."""


def kinds_of(degree: int) -> tuple[str, ...]:
    """Return the kinds of a figure: what all have, and the part of each tensor rank."""
    return ("whole on every rank", *(f"the part of rank {rank}" for rank in range(degree)))


def degree_control(*degrees: int, start: int) -> LessonControl:
    """Return the control that chooses how many tensor ranks there are."""
    return LessonControl(
        name="ranks",
        label="tensor ranks N",
        values=tuple(map(str, degrees)),
        start=degrees.index(start),
    )


def place(label: str, group: str, tiles: Sequence[Tile], note: str = "") -> Place:
    """Return a matrix in the box of its rank."""
    return Place(label=label, note=note, tiles=tuple(tiles), group=group)


def weights_fact(held: int, whole: int) -> Fact:
    """Return how many weights a rank holds."""
    return Fact(
        name="weights on a rank",
        value=f"{held:,} of {whole:,}",
        note=f"{decimal_bytes(held * BYTES)} in bf16",
    )


def nothing_sent() -> Fact:
    """Return that a step sends nothing."""
    return Fact(name="a rank sends", value=decimal_bytes(0), note="all it needs is there")


def gather_fact(piece: int, degree: int, what: str) -> Fact:
    """Return what a rank sends so that all get the pieces of all, of `piece` numbers each."""
    sent = all_gather_bytes(piece * BYTES, degree)
    return Fact(
        name="a rank sends",
        value=decimal_bytes(sent),
        note=f"all-gather of {what}: (N-1) x {decimal_bytes(piece * BYTES)}",
    )


def sum_fact(payload: int, degree: int, what: str) -> Fact:
    """Return what a rank sends to sum `payload` numbers over all."""
    sent = all_reduce_bytes(payload * BYTES, degree)
    return Fact(
        name="a rank sends",
        value=decimal_bytes(sent),
        note=f"all-reduce of {what}: 2 (N-1)/N x {decimal_bytes(payload * BYTES)}",
    )
