# SPDX-License-Identifier: Apache-2.0
"""What each tensor rank holds of a module's parameters, and which of its layers send what.

A rule gives a layer a kind:

    column           outputs are cut: each rank computes its own
    row              inputs are cut: outputs are partial sums, which are added up
    column-gathered  outputs are cut, and gathered again at once
    row-scattered    inputs are whole, and each rank takes its part of them
    vocabulary       the rows of an embedding, or of a head whose outputs are gathered
    expert           a module whose parameters are stacks of experts: each rank has some, whole
    replicated       whole on every rank, used on values that all ranks have
    summed           whole on every rank, used on values that ranks have parts of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal[
    "column",
    "row",
    "column-gathered",
    "row-scattered",
    "vocabulary",
    "expert",
    "replicated",
    "summed",
]
"""What tensor ranks do with a layer."""

CUT_OUTPUTS = ("column", "column-gathered")
CUT_INPUTS = ("row", "row-scattered")

Layer = Literal["linear", "embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Say which part of a whole parameter a tensor rank holds: of each of `parts` its share.

    `parts` are sizes along `dim` that are cut one by one (q, k and v of one matrix); together they
    are all of it. Only a single part may need padding (a vocabulary).
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]

    def local_shape(self, degree: int) -> tuple[int, ...]:
        """Return the shape of the piece of one of `degree` ranks, padding included."""
        size = sum(-(-part // degree) for part in self.parts)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def ranges(self, degree: int, index: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of `dim` that rank `index` holds, one for each part; no padding."""
        found: list[tuple[int, int]] = []
        start = 0
        for part in self.parts:
            size = -(-part // degree)
            found.append(
                (start + min(part, index * size), start + min(part, (index + 1) * size)),
            )
            start += part
        return tuple(found)

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """Say what a layer sends for each token.

    `inputs` and `outputs` are its whole widths (`outputs` padded, where it is). Layers that read
    one input share its `entry`: the sum of the gradients of that input is sent once.
    """

    name: str
    kind: Kind
    layer: Layer
    inputs: int
    outputs: int
    entry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Say of a module with stacks of experts how many there are on all ranks.

    `cut`: it is given this rank's positions, so that rows travel to their experts; otherwise all
    ranks have all of them, and add up what their experts make of these.
    """

    name: str
    num_experts: int
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRegion:
    """Say which blocks see only this rank's part of each sequence, and how wide the stream is.

    `blocks` are the modules in the order in which they run; the stream is cut before the first and
    whole again after the last.
    """

    blocks: tuple[str, ...]
    width: int

    def holds(self, name: str) -> bool:
        """Return whether a module is in one of the blocks."""
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSplit:
    """Hold how a module lies on its tensor ranks, and what it sends."""

    degree: int
    pieces: Sequence[TensorPiece]
    layers: Sequence[SplitLayer]
    summed: frozenset[str]
    """Parameters that are whole, and whose gradients are added up over the tensor ranks."""
    sequence: SequenceRegion | None = None
    experts: Sequence[StackedExperts] = ()

    def piece_of(self, name: str) -> TensorPiece | None:
        """Return what a rank holds of a parameter; None where it holds all."""
        return next((piece for piece in self.pieces if piece.name == name), None)


UNSPLIT = ModuleSplit(degree=1, pieces=(), layers=(), summed=frozenset())
"""One tensor rank."""
