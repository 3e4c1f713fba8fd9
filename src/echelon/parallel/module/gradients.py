# SPDX-License-Identifier: Apache-2.0
"""Gradients of any module: taken from autograd as they come, reduced in one order on every rank.

Split: as in `data.py`.
Sent:  as in `data.py`: each bucket once per synchronising backward.
Bytes: `module_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: nothing; buckets are padded.
Source: Li et al., "PyTorch Distributed", 2020, section 3.2 (hooks, `no_sync`, unused parameters).

Which gradients come, and when, may differ from rank to rank: a branch that only some ranks take.
So buckets start in one order, and what never came on this rank is zero when its
backward ends. Nothing hangs, whatever a rank computed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import BACKWARD_INTERRUPTED, SECOND_BACKWARD
from echelon.parallel.data import GradientReduction
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.collectives import Group


class NonBlockingReduction(GradientReduction):
    """Sum buckets without ever waiting inside of a backward: who else is there is not known."""

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Start to sum a bucket; put away those sums that have arrived."""
        self._pending.append(
            self._start_first_sum(bucket, self._later_groups(bucket) if last else [])
        )
        while self._pending and self._pending[0].pending.done():
            self._finish_sum(self._pending.popleft())


class ModuleReduction(Reduction):
    """Start the sums of full buckets in one order on every rank.

    `streamed` buckets, which all ranks come to in one order, have links of their own: a rank may
    wait for them inside of backward. The others start in the order of the buckets.
    """

    def __init__(self, dense: GradientReduction, streamed: GradientReduction | None = None) -> None:
        """Sum streamed buckets by `streamed` and all others by `dense`."""
        self._rest, self._streamed = dense, streamed
        self._both = [dense] if streamed is None else [streamed, dense]
        self._is_streamed: frozenset[str] = frozenset()
        self._orders = (_NamedOrder(), _NamedOrder())
        self._names: tuple[Sequence[str], Sequence[str]] = ([], [])

    def hold(self, buckets: Sequence[Bucket], streamed: Sequence[str] = ()) -> None:
        """Sum `buckets` from now on, those named in `streamed` in that order."""
        self._is_streamed = frozenset(streamed)
        others = [bucket.name for bucket in buckets if bucket.name not in self._is_streamed]
        self._names = (streamed, others)

    def start_backward(self) -> None:
        """Expect every bucket once."""
        self._orders = (_NamedOrder(self._names[0]), _NamedOrder(self._names[1]))

    def before_write(self, bucket: Bucket) -> None:
        """Let a bucket have its memory."""
        self._reduction_for(bucket).before_write(bucket)

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Take a full bucket; start those whose turn it is."""
        order = self._orders[0 if bucket.name in self._is_streamed else 1]
        for one in order.take(bucket):
            self._reduction_for(one).bucket_is_full(one, last=last)

    def start_step(self) -> None:
        """Forget the sums of the last step."""
        for reduction in self._both:
            reduction.start_step()

    def finish(self) -> None:
        """Return when all sums are there."""
        for reduction in self._both:
            reduction.finish()

    def _reduction_for(self, bucket: Bucket) -> GradientReduction:
        if self._streamed is not None and bucket.name in self._is_streamed:
            return self._streamed
        return self._rest


class _NamedOrder:
    """Give back what is taken in the order of names."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = deque(names)
        self._full: dict[str, Bucket] = {}

    def take(self, bucket: Bucket) -> Iterator[Bucket]:
        self._full[bucket.name] = bucket
        while self._names and self._names[0] in self._full:
            yield self._full.pop(self._names.popleft())


class BackwardPasses:
    """Follow the backward passes of a step: take each gradient, and complete what is missing."""

    def __init__(
        self,
        reduction: ModuleReduction,
        replicate: Group,
        tensor: Group,
        *,
        every: bool,
        wire: torch.dtype,
    ) -> None:
        """Reduce after `every` backward, adding up slices, or after the one that synchronises.

        `wire` is the dtype in which slices are summed over `replicate` ranks, and over `tensor`
        ranks those of partial buckets.
        """
        self._reduction, self._replicate, self._tensor = reduction, replicate, tensor
        self._every, self._wire = every, wire
        self.store = GradientStore(reduction)
        self._zero = torch.zeros(())
        self._came: set[int] = set()
        self._lent: dict[int, int] = {}
        self._ever: set[int] = set()
        self._synchronises = True
        self.running = self.reduced = False
        self.num_passes = 0
        self.on_gradient: Callable[[torch.Tensor], None] = lambda _: None

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradients of all parameters of `buckets` from now on."""
        self.store.hold(buckets)
        self._reduction.hold(buckets)
        self._zero = buckets[0].gradients.new_zeros(())
        take = _taker(self)
        for slot in self._slots():
            slot.parameter.register_post_accumulate_grad_hook(take)

    def stream(self, names: Sequence[str]) -> None:
        """Sum the named buckets in this order, in which every rank comes to them."""
        self._reduction.hold(self.store.buckets, names)

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        self.store.start_step()
        self._reduction.start_step()
        self._ever.clear()
        self.reduced, self.num_passes = False, 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward passes inside add up on this rank, without a word to the others."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def begin(self) -> None:
        """Begin a backward, unless it has begun; called from inside of it."""
        if not self.running:
            self._start(synchronises=self._synchronises)
            when_backward_ends(self._end)

    def place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return memory of a bucket that a layer may write its weight gradient to, and give on.

        That is a tensor of its own for each call. None where the gradient of this backward is for
        somebody else (`torch.autograd.grad`), or another one came before it, and for a weight that
        somebody put into a layer for one call (`torch.func.functional_call`).
        """
        if not (self.store.holds(parameter) and _goes_to(parameter)):
            return None
        self.begin()
        if id(parameter) in self._lent or id(parameter) in self._came:
            return None
        place = self.store.place(parameter)
        if place is not None:
            self._lent[id(parameter)] = place.data_ptr()
        return place

    def unused(self) -> list[str]:
        """Return the names of trained parameters that no backward of this step reached here."""
        return [slot.spec.name for slot in self._slots() if id(slot.parameter) not in self._ever]

    @torch.no_grad()
    def complete(self, bucket: Bucket) -> None:
        """Learn that nothing more comes to a bucket in this backward: what has not is zero."""
        if not (self.running and self.reduced):
            return
        for slot in bucket.slots:
            if slot.parameter.requires_grad and id(slot.parameter) not in self._came:
                self._came.add(id(slot.parameter))
                self.store.add(slot.parameter, self._zero)

    def start_missing(self) -> None:
        """Begin what no backward of this rank has done: to give the others what there is."""
        self.require_ended()
        if self.num_passes == 0 if self._every else not self.reduced:
            self._start(synchronises=True)

    def finish(self) -> None:
        """Return when the gradients of this step are summed; what came from no backward is zero."""
        if self.running:
            self._end(counts=False)
        self._reduction.finish()
        if self._every:
            self._add_replicas()

    def drop(self) -> None:
        """Forget the gradients that have come since the last step; all ranks do so together."""
        self.require_ended()
        self._reduction.finish()
        self.start_step()

    def require_ended(self) -> None:
        """Raise RunFailed where a backward was begun and an error ended it."""
        if self.running and not in_backward():
            raise RunFailed(
                BACKWARD_INTERRUPTED.problem(
                    "a backward of this rank ended with an error, after some of its gradients had "
                    "been given to the other ranks"
                )
            )

    def _start(self, *, synchronises: bool) -> None:
        sums = self._every or synchronises
        if self.reduced and not self._every:
            raise RunFailed(
                SECOND_BACKWARD.problem(
                    f"backward number {self.num_passes + 1} of this step would be added to "
                    "gradients that an earlier one has summed over the ranks",
                    suggestions=("with optimizer.no_sync(): around all but the last",),
                )
            )
        self.running = True
        self._came.clear()
        self._lent.clear()
        self._reduction.start_backward()
        # Where slices add up, no backward knows that it is the last: `finish` sums the replicas.
        self.store.start_backward(last=sums and not self._every)
        self.reduced = self.reduced or sums

    def _end(self, *, counts: bool = True) -> None:
        for bucket in self.store.buckets:
            self.complete(bucket)
        self.running = False
        self.num_passes += counts

    def _slots(self) -> list[Slot]:
        return [slot for bucket in self.store.buckets for slot in bucket.slots]

    @torch.no_grad()
    def take(self, parameter: torch.Tensor) -> None:
        """Take the gradient that autograd has just added up in a parameter."""
        self.begin()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "autograd calls this when a gradient is there"
        self.on_gradient(parameter)
        self._came.add(id(parameter))
        self._ever.add(id(parameter))
        if self._lent.get(id(parameter)) == gradient.data_ptr():
            self.store.written(parameter)
        else:
            self.store.add(parameter, gradient)

    def _add_replicas(self) -> None:
        partial = [one for one in self.store.buckets if one.plan.kind == "partial"]
        self._add_over(self._tensor, partial)
        self._add_over(self._replicate, self.store.buckets)

    def _add_over(self, group: Group, buckets: Sequence[Bucket]) -> None:
        if group.size == 1:
            return
        flights: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        for bucket in buckets:
            wire = bucket.gradient_slice.to(self._wire)
            pending = group.all_reduce(wire, name=f"gradients.{bucket.name}", async_op=True)
            flights.append((pending, wire, bucket.gradient_slice))
        for pending, wire, target in flights:
            pending.wait()
            if wire is not target:
                target.copy_(wire)


def in_backward() -> bool:
    """Return whether autograd is running a backward now, in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have autograd call `call` at the end of the backward that is running."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _goes_to(parameter: torch.Tensor) -> bool:
    """Return whether the backward that is running will put a gradient into a parameter."""
    if not in_backward():
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` was asked for the gradient of the parameter itself
        return False


def _taker(passes: BackwardPasses) -> Callable[[torch.Tensor], None]:
    """Return a hook that gives gradients to `passes` for as long as somebody holds them.

    A cycle through hooks of a parameter is never collected: it would keep every bucket and the
    threads of every group of a module that nobody has any more.
    """
    held = weakref.ref(passes)

    def take(parameter: torch.Tensor) -> None:
        owner = held()
        if owner is not None:
            owner.take(parameter)

    return take
