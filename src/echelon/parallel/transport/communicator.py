# SPDX-License-Identifier: Apache-2.0
"""A communicator: processes that torch has joined, under every group of the same ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from echelon.parallel.transport.algorithms import BackgroundThread
from echelon.parallel.transport.recorder import Recorder


class Communicator:
    """Hold the process group of some ranks, of which this is one.

    Groups of the same ranks that call in the same order share one: NCCL keeps buffers for each, and
    runs the calls of one in the order in which they come. So the exchanges of all of them are
    numbered here.
    """

    def __init__(
        self, ranks: Sequence[int], process_group: dist.ProcessGroup, name: str = ""
    ) -> None:
        """Hold the process group of `ranks`, global and in order; every member has one `name`."""
        self.ranks, self.process_group, self.name = tuple(ranks), process_group, name
        self.is_gloo = dist.get_backend(process_group) == "gloo"
        self.thread = BackgroundThread()
        self._exchanges = 0
        self.called = ""
        """What fingerprints call it, from its first operation on."""
        self.sequences: dict[tuple[int, int] | None, int] = {}
        """How many collectives were begun, and how many messages each way, for fingerprints."""

    def next_exchange(self) -> int:
        """Return the number of an exchange that begins, the same on every member."""
        self._exchanges += 1
        return self._exchanges

    def open(self, recorder: Recorder, axis: str) -> None:
        """Join the members before the first call that counts; all of them call it together.

        NCCL joins them inside of the first call, and holds the host until all have come: one that
        is still busy elsewhere, and waits there for one of these, would never come.
        """
        if not self.is_gloo:
            token, name = torch.zeros(1, device=self._device()), f"the other ranks of {axis}"
            number = recorder.begun(self, axis, "all_reduce", name, token)
            with recorder.waiting(name, number):
                dist.all_reduce(token, group=self.process_group)
            recorder.over(number)

    def open_links(self, pairs: Iterable[tuple[int, int]], recorder: Recorder) -> None:
        """Open the links between pairs of members, in this order; all members call it together.

        NCCL opens a link inside of the first message over it, where either end waits for the
        other. In a pipeline the first message of one rank may be on another link than that of its
        peer, and both would wait for ever; so links are opened here, one after the other.
        """
        token = torch.zeros(1, device=self._device())
        index = self.ranks.index(recorder.rank)
        with recorder.waiting("the other ranks of the pipeline"):
            for first, second in pairs:
                if index == first:
                    dist.send(token, self.ranks[second], group=self.process_group)
                elif index == second:
                    dist.recv(token, self.ranks[first], group=self.process_group)

    def _device(self) -> torch.device:
        if self.is_gloo:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
