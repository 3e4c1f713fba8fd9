"""The boundaries of a block by its shape."""

from __future__ import annotations

from echelon.core.model_shape import ModelShape
from echelon.models.boundaries import INPUT, OUTPUT, PARTS


def block_boundaries(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Return the boundaries of a block, in the order of the forward pass."""
    there = {"attention", "mlp", *shape.norms}
    parts = (part for part in PARTS if part in there)
    return tuple(f"layers.{layer}.{part}" for part in (INPUT, *parts, OUTPUT))
