# SPDX-License-Identifier: Apache-2.0
"""Gradients summed in two hops of integers of few bits (qgZ of ZeRO++).

n ranks sum a bucket into a slice each; l of them are on each of k nodes, rank j of node a has slice
a l + j. Codes of blocks of `REDUCE_BLOCK` numbers travel, each block with a scale:

    hop 1   inside of a node: rank j is sent its k slices, one for each node, by the l - 1 others,
            and adds them to its own
    hop 2   across nodes: rank j of each node sends every other node's rank j that node's slice of
            the sum, which adds it to its own

What a rank has itself is never rounded. So each number of a sum was rounded once for each other
rank of the same node and place, on every node, and once for each other node. With the largest
numbers x_m of the block of rank m, and s_a of the sum of node a, L = 127 (int8) or 7 (int4), the
sum is off by at most

    sum over k (l - 1) ranks of x_m / (2 L)  +  sum over k - 1 nodes of (s_a + e_a) / (2 L),

where e_a is how far the sum of node a was off. Source: Wang et al., "ZeRO++", 2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from echelon.core.plan import ReduceKind
from echelon.cost.bytes.quantised import LARGEST_CODES, REDUCE_BLOCK, blocks_of_slice, message_bytes
from echelon.models.precision import at_least_fp32
from echelon.parallel.transport.collectives import Group, Pending

SumWatch = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Is told the name of a sum, what this rank had of it, and the slice that came out."""


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Make codes of slices, and numbers of codes; `dtype` is that of sums and scales.

    Shape suffixes: R slices, S numbers of each, m bytes of its message.
    """

    kind: ReduceKind
    dtype: torch.dtype

    def encode(self, values_RS: torch.Tensor) -> torch.Tensor:
        """Return slices as bytes [R, m]: the scales of the blocks of each, then its codes."""
        blocks = self._blocks(values_RS.to(self.dtype))
        scales = self._scales(blocks)
        most, rows = LARGEST_CODES[self.kind], blocks.shape[0]
        codes = (blocks / scales[:, :, None]).round_().clamp_(-most, most).nan_to_num_(0.0)
        if self.kind == "int4":
            halves = codes.add_(8).to(torch.uint8).view(rows, -1, 2)
            packed = halves[:, :, 0] | (halves[:, :, 1] << 4)
        else:
            packed = codes.to(torch.int8).view(rows, -1).view(torch.uint8)
        return torch.cat((scales.view(torch.uint8), packed), dim=1)

    def decode(self, message_Rm: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` numbers of each slice that was sent [R, S]."""
        num_blocks, rows = blocks_of_slice(count), message_Rm.shape[0]
        split = num_blocks * self.dtype.itemsize
        # A copy, for scales need not begin where a number may.
        scales = message_Rm[:, :split].clone(memory_format=torch.contiguous_format).view(self.dtype)
        packed = message_Rm[:, split:]
        if self.kind == "int4":
            codes = torch.stack((packed & 15, packed >> 4), dim=2).to(self.dtype).sub_(8)
        else:
            codes = packed.view(torch.int8).to(self.dtype)
        values = codes.view(rows, num_blocks, -1) * scales[:, :, None]
        return values.view(rows, -1)[:, :count]

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        largest = torch.linalg.vector_norm(blocks, float("inf"), dim=2)
        return (largest / LARGEST_CODES[self.kind]).masked_fill_(largest == 0, 1.0)

    @staticmethod
    def _blocks(values_RS: torch.Tensor) -> torch.Tensor:
        rows, count = values_RS.shape
        missing = blocks_of_slice(count) * REDUCE_BLOCK - count
        return fn.pad(values_RS, (0, missing)).view(rows, -1, REDUCE_BLOCK)


class QuantisedSums:
    """Sum buckets over the ranks of a node, then across nodes."""

    def __init__(self, kind: ReduceKind, near: Group, far: Group, dtype: torch.dtype) -> None:
        """Sum over `near`, this node's ranks, and `far`, those of this place on all nodes."""
        self._near, self._far = near, far
        self._codes = BlockCodes(kind, at_least_fp32(dtype))
        self.watch: SumWatch | None = None

    def start(self, target: torch.Tensor, whole: torch.Tensor, *, name: str) -> HopSum:
        """Start to fill `target` with this rank's slice of the sum of `whole` over all ranks.

        `whole` must not change until the wait.
        """
        return HopSum(self, target, whole, name)

    def first_hop(self, whole: torch.Tensor, name: str) -> tuple[torch.Tensor, Pending]:
        """Start the exchange in the node; return what is received, a row from each member."""
        near, far = self._near.size, self._far.size
        slices, codes = whole.view(far, near, -1), self._codes
        size = message_bytes(slices.shape[2], codes.kind, codes.dtype.itemsize)
        sent = whole.new_empty((near, far, size), dtype=torch.uint8)
        for place in range(near):
            sent[place] = codes.encode(slices[:, place])
        received = torch.empty_like(sent)
        return received, self._near.all_to_all(received, sent, name=name, async_op=True)

    def second_hop(self, received: torch.Tensor, whole: torch.Tensor, name: str) -> SecondHop:
        """Add up what came in the node, and start the exchange across nodes."""
        near, far, codes = self._near, self._far, self._codes
        slices = whole.view(far.size, near.size, -1)
        count = slices.shape[2]
        sums = slices[:, near.index].to(codes.dtype, copy=True)
        for place in range(near.size):
            if place != near.index:
                sums += codes.decode(received[place], count)
        sent = codes.encode(sums)
        came = torch.empty_like(sent)
        pending = far.all_to_all(came, sent, name=name, async_op=True)
        # A copy: sums of the slices of other nodes need not stay until these have theirs.
        return SecondHop(pending, came, sums[far.index].clone())

    def finish(self, hop: SecondHop, whole: torch.Tensor, target: torch.Tensor, name: str) -> None:
        """Wait for what comes from other nodes, and add it up."""
        hop.pending.wait()
        far, total = self._far, hop.own
        for node in range(far.size):
            if node != far.index:
                total += self._codes.decode(hop.came[node : node + 1], total.numel())[0]
        if self.watch is not None:
            # The target may be a part of what was summed.
            self.watch(name, whole, total)
        target.copy_(total)


@dataclass(frozen=True, slots=True)
class SecondHop:
    """Hold an exchange across nodes under way, what it fills, and the own slice of the sum."""

    pending: Pending
    came: torch.Tensor
    own: torch.Tensor


class HopSum(Pending):
    """A sum in two hops, each of which runs beside whatever its ranks do.

    All members begin the second hop at the same place of their order, or where they wait.
    """

    __slots__ = ("_first", "_second", "_sums", "_target", "_whole")

    def __init__(
        self, sums: QuantisedSums, target: torch.Tensor, whole: torch.Tensor, name: str
    ) -> None:
        super().__init__(name=name)
        self._sums, self._target = sums, target
        self._whole: torch.Tensor | None = whole
        self._first: tuple[torch.Tensor, Pending] | None = sums.first_hop(whole, name)
        self._second: SecondHop | None = None

    def begin_second_hop(self) -> None:
        """Wait for the first hop and start the second; a second call returns at once."""
        if self._first is None:
            return
        assert self._whole is not None, "it is there until the second hop has ended"
        received, first = self._first
        first.wait()
        # What was sent is in the hands of nobody else.
        self._first = first = None
        self._second = self._sums.second_hop(received, self._whole, self._name)

    def done(self) -> bool:
        """Return whether it was awaited: nobody knows before."""
        return self._whole is None

    def wait(self) -> None:
        """Return when the slice is there; a second call returns at once."""
        if self._whole is None:
            return
        self.begin_second_hop()
        assert self._second is not None, "it has just begun"
        self._sums.finish(self._second, self._whole, self._target, self._name)
        self._second = self._whole = None
