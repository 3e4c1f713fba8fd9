# SPDX-License-Identifier: Apache-2.0
"""Collectives that are messages between pairs of members, all of them under way at once.

Over Gloo, all-gather and reduce-scatter are direct exchanges. Gloo's own reduce-scatter sends as
much as an all-reduce, and its all-gather and all-to-all leave a link idle between their rounds: on
two hosts with 200 Mbit/s links, 2.1 MB each way took 112 ms and 145 ms where the bytes take 84 ms,
and these exchanges 87 ms. Every rank sends n-1 pieces and gets n-1, as in a ring, so the bytes are
those of `cost/bytes/terms.py`. Sums are made in rank order: the same bits on every run.

In an exchange of any sizes each pair of members has at most one message each way: plain messages
with the tag of the exchange over Gloo, one batch that runs as one operation over NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Messages = Mapping[int, torch.Tensor]
"""Flat tensors by the place of the other member in the group."""


@dataclass(frozen=True, slots=True)
class PendingWorks:
    """Several messages under way, as one handle; `tensors` live as long as it.

    `members` are the other ends, by their global ranks, where each work is one message.
    """

    works: Sequence[dist.Work]
    tensors: Iterable[torch.Tensor]
    members: Sequence[int] = ()

    def wait(self) -> None:
        """Return when all messages have been sent and received."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        """Return whether all messages are known to have arrived; over Gloo, not before `wait`."""
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True, slots=True)
class GlooPeers:
    """Name the members of a group for one exchange: global ranks, this one's place, the tag.

    The tag tells exchanges of one group apart that are under way at the same time.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    index: int
    tag: int

    def others(self) -> list[int]:
        """Return the places of the other members, the next one first."""
        size = len(self.ranks)
        return [(self.index + step) % size for step in range(1, size)]

    def ends_of_all(self) -> list[int]:
        """Return the global ranks of the others, as received from and then as sent to."""
        others = [self.ranks[place] for place in self.others()]
        return others[::-1] + others

    def send(self, tensor: torch.Tensor, member: int) -> dist.Work:
        """Start to send to the member at `place`."""
        return _started(dist.isend(tensor, self.ranks[member], group=self.group, tag=self.tag))

    def receive(self, tensor: torch.Tensor, member: int) -> dist.Work:
        """Start to receive from the member at `place`."""
        return _started(dist.irecv(tensor, self.ranks[member], group=self.group, tag=self.tag))


def start_all_gather(whole: torch.Tensor, shard: torch.Tensor, peers: GlooPeers) -> PendingWorks:
    """Start to fill `whole` with the pieces of all members, in their order."""
    parts = whole.view(len(peers.ranks), *shard.shape)
    works = [peers.receive(parts[place], place) for place in peers.others()[::-1]]
    works += [peers.send(shard, place) for place in peers.others()]
    parts[peers.index].copy_(shard)
    return PendingWorks(works, (shard,), peers.ends_of_all())


def start_reduce_scatter(
    received: torch.Tensor, whole: torch.Tensor, peers: GlooPeers
) -> PendingWorks:
    """Start to fill `received` [n - 1, piece] with the parts of the others for this rank.

    They lie in the order of `GlooPeers.others`.
    """
    parts = whole.view(len(peers.ranks), *received.shape[1:])
    into = dict(zip(peers.others(), received, strict=True))
    works = [peers.receive(into[place], place) for place in peers.others()[::-1]]
    works += [peers.send(parts[place], place) for place in peers.others()]
    return PendingWorks(works, (whole,), peers.ends_of_all())


def add_in_order(
    shard: torch.Tensor, received: torch.Tensor, whole: torch.Tensor, index: int
) -> None:
    """Fill `shard` with the sum of all members' parts: this one's, then those of the others.

    `shard` may be this member's part of `whole`. Only one member adds up a piece, so the order need
    not be the same on all of them, only the same on every run.
    """
    own = whole.view(len(received) + 1, *received.shape[1:])[index]
    torch.add(own, received[0], out=shard)
    for part in received[1:]:
        shard.add_(part)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of the group"
    return work


def start_gloo_exchange(sends: Messages, receives: Messages, peers: GlooPeers) -> PendingWorks:
    """Start an exchange over Gloo."""
    works = [peers.receive(tensor, place) for place, tensor in receives.items()]
    works += [peers.send(tensor, place) for place, tensor in sends.items()]
    members = [peers.ranks[place] for place in (*receives, *sends)]
    return PendingWorks(works, (*sends.values(), *receives.values()), members)


def start_nccl_exchange(
    sends: Messages, receives: Messages, ranks: Sequence[int], group: dist.ProcessGroup | None
) -> PendingWorks:
    """Start an exchange over NCCL, whose links an earlier collective of the group has opened."""
    batch = [
        dist.P2POp(dist.irecv, tensor, ranks[place], group) for place, tensor in receives.items()
    ]
    batch += [
        dist.P2POp(dist.isend, tensor, ranks[place], group) for place, tensor in sends.items()
    ]
    works = dist.batch_isend_irecv(batch) if batch else []
    return PendingWorks(works, (*sends.values(), *receives.values()))
