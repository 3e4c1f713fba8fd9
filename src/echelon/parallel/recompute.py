# SPDX-License-Identifier: Apache-2.0
"""Recompute: keep only the input of a block or an operator; run forward again in backward.

Split: nothing; it trades compute for memory.
Sent:  the forward collectives of each recomputed block or operator a second time.
Bytes: `tensor_bytes` in `cost/bytes/sent.py` and `context_bytes` in `cost/bytes/context_sent.py`
       count the forward of what is recomputed twice.
Must divide: nothing.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al.,
       "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5 (operators).

The policy says which blocks: none, all ("full"), or every k-th. Dropout masks are functions of the
token, so the second forward drops what the first did and no generator state is kept. The inputs
that are kept wait for backward on the device, or on the host: copied down beside the computation,
in memory that is used again and again, and copied up when the backward pass comes near. The bits
are those of the tensor.

Of a block that is not recomputed whole, chosen operators are: the norms, the activation of the MLP,
the MLP up to its last layer, attention from the projections to its output. An operator keeps its
input; what it makes is read by a linear layer, which in place of that tensor keeps how to make it.
Backward of that layer makes it, and with it all that backward of the operator needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from echelon.core.plan import Recompute
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block, run_block
from echelon.parallel.completion.completion import Completion
from echelon.parallel.offload.host_memory import (
    CopyStreams,
    StreamEvent,
    locked_memory,
    make_copy_streams,
    plain_memory,
)


class _RecomputedBlock(torch.autograd.Function):
    """Run a block without keeping what its backward needs; make it again when asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        block: Block,
        batch: TokenBatch,
        host: HostActivations | None,
    ) -> torch.Tensor:
        """Return the block's output; keep its input only."""
        if host is None:
            ctx.save_for_backward(x_ND)
        else:
            ctx.stored = host.store(x_ND, forward_pass=batch)
        ctx.block, ctx.batch, ctx.on_host = block, batch, host is not None
        return block(x_ND, batch)

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the block forward again, then its backward."""
        x_ND = ctx.stored.take() if ctx.on_host else ctx.saved_tensors[0].detach()
        x_ND.requires_grad_()
        with torch.enable_grad():
            y_ND = ctx.block(x_ND, ctx.batch)
        torch.autograd.backward(y_ND, dy_ND)
        return x_ND.grad, None, None, None


_Make = Callable[[torch.Tensor], torch.Tensor]


class Remade(ABC):
    """What a linear layer keeps in place of its input: how to make it again, once."""

    @abstractmethod
    def make(self) -> torch.Tensor:
        """Return the input of the layer; keep what backward of its maker needs till that runs."""


class _OperatorOutput(Remade):
    """Make the output of an operator again, and keep what its backward needs till that runs."""

    def __init__(self, make: _Make, x: torch.Tensor | Remade) -> None:
        """Take the input, or what makes that."""
        self._make = make
        self._x: torch.Tensor | Remade | None = x
        self._again: tuple[torch.Tensor, GradientEdge] | None = None

    def make(self) -> torch.Tensor:
        """Return the output."""
        x = self._x.make() if isinstance(self._x, Remade) else self._x
        assert x is not None, "the layer that reads it runs backward once"
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = self._make(x)
        # Of the output the place in the graph is enough: its memory goes when its reader is done.
        self._again = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, dy: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the input; let go of all."""
        assert self._again is not None, "backward of the layer that reads it comes first"
        # The graph may live on for long, and this with it.
        (x, edge), self._again, self._x = self._again, None, None
        torch.autograd.backward((edge,), (dy,))
        return x.grad


class _RecomputedOperator(torch.autograd.Function):
    """Run an operator without keeping what its backward needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: _Make, output: _OperatorOutput) -> torch.Tensor:
        """Return what the operator makes of x, which `output` keeps."""
        ctx.output = output
        return make(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the backward of what was made again."""
        return ctx.output.backward(dy), None, None


class OperatorRecompute:
    """Run operators of the block at work, those that are to be made again without keeping much."""

    def __init__(self) -> None:
        """Recompute nothing until a block says what."""
        self._operators: Set[str] = frozenset()
        self._outputs = WeakIdKeyDictionary()

    @contextmanager
    def of(self, operators: Set[str]) -> Iterator[None]:
        """Recompute these operators inside."""
        before, self._operators = self._operators, operators
        try:
            yield
        finally:
            self._operators = before

    def remakes(self, name: str) -> bool:
        """Return whether an operator of the block at work is to be made again."""
        return name in self._operators and torch.is_grad_enabled()

    def remember(self, y: torch.Tensor, remade: Remade) -> None:
        """Let the layer that reads y keep how it is made in its place."""
        self._outputs[y] = remade

    def operator(self, name: str, make: _Make, x: torch.Tensor) -> torch.Tensor:
        """Return make(x)."""
        if not self.remakes(name):
            return make(x)
        output = _OperatorOutput(make, self._outputs.pop(x, x.detach()))
        y = _RecomputedOperator.apply(x, make, output)
        self.remember(y, output)
        return y

    def makes_again(self, x: torch.Tensor) -> bool:
        """Return whether x is the output of an operator that backward makes again."""
        return x in self._outputs

    @contextmanager
    def reads(self, x: torch.Tensor) -> Iterator[None]:
        """Let the layer inside, which reads x, keep how x is made in its place."""
        output: Remade | None = self._outputs.pop(x, None)
        if output is None:
            yield
            return
        storage = x.untyped_storage()._cdata

        def pack(kept: torch.Tensor) -> torch.Tensor | Remade:
            return output if kept.untyped_storage()._cdata == storage else kept

        def unpack(kept: torch.Tensor | Remade) -> torch.Tensor:
            return kept.make() if isinstance(kept, Remade) else kept

        with saved_tensors_hooks(pack, unpack):
            yield


class RecomputingRunner:
    """Run the blocks of a decoder under a policy; `host` is where inputs wait off the device."""

    def __init__(
        self,
        policy: Recompute,
        operators: OperatorRecompute,
        completion: Completion | None = None,
    ) -> None:
        """Store nothing yet; `completion` says when copies complete."""
        self.policy, self.operators = policy, operators
        streams = (completion or Completion()).copy_streams
        self.host = HostActivations(streams) if policy.offload == "host" else None

    def __call__(self, block: Block, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the output of a block, keeping what the policy says."""
        if self.policy.recomputes(block.index) and torch.is_grad_enabled():
            return _RecomputedBlock.apply(x_ND, block, batch, self.host)
        with self.operators.of(self.policy.operators_of(block.index)):
            return run_block(block, x_ND, batch)


class HostActivations:
    """Store tensors of forward passes; count what they take."""

    def __init__(
        self, make_streams: Callable[[torch.device], CopyStreams] = make_copy_streams
    ) -> None:
        """Allocate nothing yet; `make_streams` makes what copies from and to a device."""
        self._make_streams = make_streams
        self._streams: dict[torch.device, CopyStreams] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._latest: ref[OffloadedActivation] | None = None
        self.allocated_bytes = 0
        self.stored_bytes = 0
        self.peak_stored_bytes = 0

    def store(self, x: torch.Tensor, forward_pass: object) -> OffloadedActivation:
        """Copy `x` to the host for the backward of `forward_pass`, which takes the last first."""
        if x.device not in self._streams:
            self._streams[x.device] = self._make_streams(x.device)
        streams = self._streams[x.device]
        memory = self._take(x)
        streams.record_use(x)
        host = memory.view(x.dtype).view(x.shape)
        # What is computed waits for all that was copied up, so this comes after the last use of
        # the memory too.
        copied = streams.copy("down", [(host, x.detach())], [streams.record_event()])
        earlier = self._latest() if self._latest is not None else None
        stored = OffloadedActivation(
            activations=self,
            streams=streams,
            memory=memory,
            host=host,
            device=x.device,
            copied=copied,
            forward_pass=forward_pass,
            earlier=ref(earlier)
            if earlier is not None and earlier.forward_pass is forward_pass
            else None,
        )
        self._latest = ref(stored)
        self.stored_bytes += memory.nbytes
        self.peak_stored_bytes = max(self.peak_stored_bytes, self.stored_bytes)
        return stored

    def give_back(self, memory: torch.Tensor) -> None:
        """Use memory for another tensor."""
        self.stored_bytes -= memory.nbytes
        self._free.setdefault(memory.nbytes, []).append(memory)

    def _take(self, x: torch.Tensor) -> torch.Tensor:
        free = self._free.get(x.nbytes)
        if free:
            return free.pop()
        memory = (locked_memory if x.is_cuda else plain_memory)(x.nbytes)
        self.allocated_bytes += memory.untyped_storage().nbytes()
        return memory


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class OffloadedActivation:
    """A tensor that waits on the host; it is taken once, or never where a graph is dropped."""

    activations: HostActivations
    """What stores all of them."""
    streams: CopyStreams
    """The streams of copies."""
    memory: torch.Tensor | None
    """Memory on the host; None once it is given back."""
    host: torch.Tensor
    """A view of `memory` with the shape and dtype of the tensor."""
    device: torch.device
    """The device that it goes back to."""
    copied: StreamEvent
    """When it has left the device."""
    forward_pass: object
    """The forward pass that stored it."""
    earlier: ref[OffloadedActivation] | None
    """What the same forward pass stored before."""
    brought: tuple[torch.Tensor, StreamEvent] | None = None
    """The tensor on the device again and when it is complete, once it was fetched."""

    def start_copy(self) -> None:
        """Start to copy the tensor up; a second call does nothing."""
        if self.brought is not None or self.memory is None:
            return
        x = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        self.streams.record_use(x)
        # The new memory may still be read by what was computed in it before.
        after = [self.copied, self.streams.record_event()]
        self.brought = x, self.streams.copy("up", [(x, self.host)], after)

    def take(self) -> torch.Tensor:
        """Return the tensor, and start to bring the one that its forward pass stored before."""
        self.start_copy()
        assert self.brought is not None, "a stored tensor is taken once"
        x, arrived = self.brought
        self.streams.wait_for(arrived)
        self._give_back()
        earlier = self.earlier() if self.earlier is not None else None
        if earlier is not None:
            earlier.start_copy()
        return x

    def _give_back(self) -> None:
        memory, self.memory, self.brought = self.memory, None, None
        if memory is not None:
            self.activations.give_back(memory)

    def __del__(self) -> None:
        """Give back memory that no backward asked for."""
        self._give_back()
