# SPDX-License-Identifier: Apache-2.0
"""The inside of attention of a shrunk model: kinds of blocks, and stretched positions."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import LayerKind, ModelShape, RopeScaling
from echelon.core.plan import Plan


def small_kinds(shape: ModelShape, layers: int) -> tuple[LayerKind, ...]:
    """Return kinds of blocks of which `layers` blocks have as many different ones as can be.

    A long run of one kind is as good as one block of it.
    """
    kinds = shape.layer_kinds
    if len(kinds) <= layers:
        return kinds
    befores: tuple[LayerKind | None, ...] = (None, *kinds)
    changes: list[LayerKind] = [
        kind for kind, before in zip(kinds, befores, strict=False) if kind != before
    ]
    return tuple(changes[:layers])


def small_stretch(plan: Plan, sequence_length: int, width: int) -> RopeScaling | None:
    """Return a stretch of a small model: with a divisor for each frequency that it has left.

    Sequences that were longer than the original positions are so still.
    """
    scaling = plan.model.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return scaling
    original = scaling.original_positions
    assert original is not None, "a rule asks for it"
    longer = plan.mathematics.sequence_length > original

    def few(factors: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factors[pair % len(factors)] for pair in range(width // 2))

    return replace(
        scaling,
        original_positions=max(2, sequence_length // 2 if longer else sequence_length),
        short_factors=few(scaling.short_factors),
        long_factors=few(scaling.long_factors),
    )
