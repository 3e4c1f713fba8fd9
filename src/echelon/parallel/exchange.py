"""Messages of different sizes between any members of a group, all of them under way at once.

Each pair of members has at most one message each way. Over Gloo they are plain messages with the
tag of the exchange; over NCCL they are one batch, which runs as one operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from echelon.parallel.direct import Peers

Messages = Mapping[int, torch.Tensor]
"""Flat tensors by the place of the other member in the group."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of one exchange as one handle; their tensors live as long as it."""

    works: Sequence[dist.Work]
    messages: tuple[Messages, Messages]

    def wait(self) -> None:
        """Return when all messages have been sent and received."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        """Return whether all messages are known to have arrived; over Gloo, not before `wait`."""
        return all(work.is_completed() for work in self.works)


def start_messages(sends: Messages, receives: Messages, peers: Peers) -> Exchange:
    """Start an exchange over Gloo."""
    works = [peers.receive(tensor, place) for place, tensor in receives.items()]
    works += [peers.send(tensor, place) for place, tensor in sends.items()]
    return Exchange(works, (sends, receives))


def start_batch(
    sends: Messages, receives: Messages, ranks: Sequence[int], group: dist.ProcessGroup | None
) -> Exchange:
    """Start an exchange over NCCL, whose links an earlier collective of the group has opened."""
    batch = [
        dist.P2POp(dist.irecv, tensor, ranks[place], group) for place, tensor in receives.items()
    ]
    batch += [
        dist.P2POp(dist.isend, tensor, ranks[place], group) for place, tensor in sends.items()
    ]
    works = dist.batch_isend_irecv(batch) if batch else []
    return Exchange(works, (sends, receives))
