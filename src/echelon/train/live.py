"""Bytes of model state that a rank holds now, counted from the storages that are alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.parallel.offload.rest import storage_bytes

if TYPE_CHECKING:
    from echelon.train.engine import TrainEngine

MASTERS, STATE = "master parameters", "optimizer state"


def held_bytes(engine: TrainEngine) -> dict[str, int]:
    """Return the bytes between steps by name of term (`cost.bytes_held`), over all pools."""
    engine.model.residency.settle()
    buckets = engine.model.buckets
    found = {
        "parameters": storage_bytes(
            tensor
            for bucket in buckets
            for tensor in (bucket.values, bucket.value_slice)
            if tensor is not bucket.values or bucket.values_memory.present
        ),
        "gradients": storage_bytes(
            tensor
            for bucket in buckets
            for tensor in (bucket.gradients, bucket.gradient_slice)
            if tensor is not bucket.gradients or bucket.gradients_memory.present
        ),
        MASTERS: 0,
        STATE: 0,
    }
    for kind, flats in engine.optimizer.state().items():
        found[MASTERS if kind == "master" else STATE] += storage_bytes(flats.values())
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}
