# SPDX-License-Identifier: Apache-2.0
"""Bytes that a run writes: of a checkpoint, and once of the frozen weights beside them.

They do not depend on the layout: a checkpoint holds each element of each tensor once, without
padding, in the dtypes that ranks keep. Trained weights take the values that the optimizer updates
and what it keeps of each (12 bytes with AdamW in fp32: Rajbhandari et al., "ZeRO", 2020, section
3.1); frozen ones take the dtype of parameters, once in a run. Headers and indexes come on top, and
the numbers of routers.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.parameters import parameters
from echelon.core.plan import DTYPE_BYTES, Mathematics
from echelon.layout.stage import update_rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Give the bytes of tensors that a run writes."""

    trained: int
    """Of a checkpoint: values that the optimizer updates."""
    optimizer: int
    """Of a checkpoint: what the optimizer keeps of them."""
    base: int
    """Once in a run: weights that never change."""

    @property
    def checkpoint(self) -> int:
        """Return the bytes of a checkpoint, without the base that it stands on."""
        return self.trained + self.optimizer


def stored_bytes(numbers: Mathematics) -> StoredBytes:
    """Return what a run with this mathematics writes."""
    precision = numbers.precision
    trained = optimizer = base = 0
    for spec in parameters(numbers.model):
        if spec.frozen:
            base += spec.numel * DTYPE_BYTES[precision.parameters]
            continue
        kinds = len(OPTIMIZERS[update_rule_of(numbers.optimizer, spec)].state)
        trained += spec.numel * DTYPE_BYTES[precision.master]
        optimizer += spec.numel * DTYPE_BYTES[precision.master] * kinds
    return StoredBytes(trained=trained, optimizer=optimizer, base=base)
