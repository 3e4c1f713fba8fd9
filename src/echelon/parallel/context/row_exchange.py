# SPDX-License-Identifier: Apache-2.0
"""How rows of other places move from step to step of a ring (`layout/ring_plan.py` says which).

What arrives or leaves in one stretch of the tensor of a block is received into it and sent from it
with no copy; the rest is packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.layout.ring_plan import RingPlan
from echelon.layout.ring_transfers import RowTransfer
from echelon.parallel.transport.collectives import Group, Pending


@dataclass(slots=True)
class PendingTransfer:
    """Hold an exchange under way, and what to do with what arrives."""

    pending: Pending
    arrivals: list[tuple[torch.Tensor, list[torch.Tensor], bool]]

    def finish(self) -> None:
        """Return when all rows are in their places: put there, or added to what is there."""
        self.pending.wait()
        for buffer, targets, add in self.arrivals:
            parts = buffer.split([target.shape[0] for target in targets])
            for target, part in zip(targets, parts, strict=True):
                if add:
                    target.add_(part)
                else:
                    target.copy_(part)


def start_transfer(
    transfers: Sequence[RowTransfer],
    tensors: Mapping[int, torch.Tensor],
    plan: RingPlan,
    ring: Group,
    *,
    name: str,
    add: bool,
) -> PendingTransfer:
    """Start to send and receive the rows of `transfers`: from and into the tensors of their owners.

    With `add`, what arrives is added to what is there. A pair of places has one message each way.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    for transfer in transfers:
        rows = plan.rows_from(transfer.owner)
        assert rows is not None, "a hop names rows that this place holds"
        parts = [tensors[transfer.owner][place] for place in rows.slices_of(transfer.rows)]
        if transfer.source == plan.ring_rank:
            outgoing.setdefault(transfer.target, []).extend(parts)
        else:
            incoming.setdefault(transfer.source, []).extend(parts)
    sends = {
        to: (parts[0] if len(parts) == 1 else torch.cat(parts)) for to, parts in outgoing.items()
    }
    receives: dict[int, torch.Tensor] = {}
    arrivals: list[tuple[torch.Tensor, list[torch.Tensor], bool]] = []
    for source, parts in incoming.items():
        if len(parts) == 1 and not add:
            receives[source] = parts[0]
            continue
        rows_R = sum(part.shape[0] for part in parts)
        receives[source] = parts[0].new_empty((rows_R, *parts[0].shape[1:]))
        arrivals.append((receives[source], parts, add))
    return PendingTransfer(ring.exchange(sends, receives, name=name), arrivals)
