"""Where backward puts gradients: straight into the flat buckets, with nothing copied.

A kernel's backward gives its weight gradient here instead of to autograd: a matrix product writes
into the bucket (overwriting on the first microbatch, adding on the others), so there is no
gradient tensor of its own, no zeroing pass and no adding pass. When the last contribution has
come, the bucket is complete and its reduction starts: once per step, or after every microbatch
where slices add up (`cost.buckets.accumulates_slices`).

Weight gradients may be put off (`defer`): nothing in backward waits for them, so they are what is
computed while a collective is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from echelon.parallel.buckets import Bucket, Slot

Work = Callable[[], None]


class Reduction(Protocol):
    """Whoever sums buckets over ranks."""

    def before_write(self, bucket: Bucket) -> None:
        """Learn that gradients are about to be written into a bucket; give it its memory."""
        ...

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Learn that all gradients of a bucket are there; `last`: of the whole step."""
        ...


class NoReduction:
    """Sum over nobody: what a store needs where there is one data rank."""

    def before_write(self, bucket: Bucket) -> None:
        """Do nothing: the memory of the gradients stays."""

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Do nothing: the gradients are the sum."""


class GradientStore:
    """Take the gradients of one rank's parameters, microbatch by microbatch."""

    def __init__(self, reduction: Reduction, *, every_microbatch: bool = False) -> None:
        """Tell `reduction` of full buckets: after every microbatch, or after the last one."""
        self.buckets: Sequence[Bucket] = ()
        self._reduction, self._every = reduction, every_microbatch
        self._slots: dict[int, Slot] = {}
        self._runs: dict[tuple[int, ...], tuple[Bucket, slice] | None] = {}
        self._values: dict[tuple[int, ...], torch.Tensor] = {}
        self._gradients: dict[tuple[int, ...], torch.Tensor] = {}
        self._deferred: list[Work] = []
        self._counts = self._last = False

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Write into `buckets` from now on."""
        self.buckets = buckets
        self._slots = {id(slot.parameter): slot for bucket in buckets for slot in bucket.slots}

    def start_step(self) -> None:
        """Forget the gradients of the last step: the first contribution overwrites them."""
        for slot in self._slots.values():
            slot.fresh = True

    def start_backward(self, *, last: bool) -> None:
        """Begin the backward of one microbatch; `last` says that it is the last of the step."""
        self._last = last
        self._counts = last or self._every
        if not self._counts:
            return
        for bucket in self.buckets:
            bucket.missing = sum(slot.uses for slot in bucket.slots)
        if self._every:
            self.start_step()

    def defer(self, work: Work) -> None:
        """Keep a weight gradient for later: for the next time that something is in flight."""
        self._deferred.append(work)

    def run_deferred(self) -> None:
        """Compute the weight gradients that were put off."""
        deferred, self._deferred = self._deferred, []
        with torch.no_grad():  # inside of backward it is so already, after it not
            for work in deferred:
                work()

    def matrices(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return matrices of equal width that lie side by side as one; None if they do not."""
        key = tuple(id(parameter) for parameter in parameters)
        run = self._run(key)
        if run is None:
            return None
        if key not in self._values:
            self._values[key] = run[0].value_rows(run[1], parameters[0])
        return self._values[key]

    def add_product(
        self, parameters: Sequence[torch.Tensor], dy_NO: torch.Tensor, x_NI: torch.Tensor
    ) -> None:
        """Add dy^T x to the gradient of `parameters`, whose rows dy's columns are in order."""
        key = tuple(id(parameter) for parameter in parameters)
        run = self._run(key)
        if run is not None:
            slots = [self._slots[one] for one in key]
            self._open(slots[0])
            if key not in self._gradients:
                self._gradients[key] = run[0].gradient_rows(run[1], parameters[0])
            _product(self._gradients[key], dy_NO, x_NI, fresh=slots[0].fresh)
            for slot in slots:
                self._arrived(slot)
            return
        start = 0
        for parameter in parameters:
            slot, end = self._slots[id(parameter)], start + parameter.shape[0]
            self._open(slot)
            _product(slot.gradient, dy_NO[:, start:end], x_NI, fresh=slot.fresh)
            self._arrived(slot)
            start = end

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient that was computed elsewhere."""
        slot = self._slots[id(parameter)]
        self._open(slot)
        if slot.fresh:
            slot.gradient.copy_(gradient)
        else:
            slot.gradient.add_(gradient)
        self._arrived(slot)

    def add_rows(
        self, parameter: torch.Tensor, rows_N: torch.Tensor, gradient_ND: torch.Tensor
    ) -> None:
        """Add row n of a gradient to row `rows_N[n]` of the parameter's."""
        slot = self._slots[id(parameter)]
        self._open(slot)
        if slot.fresh:
            slot.gradient.zero_()
        slot.gradient.index_add_(0, rows_N, gradient_ND.to(slot.gradient.dtype))
        self._arrived(slot)

    def _open(self, slot: Slot) -> None:
        if slot.fresh:
            self._reduction.before_write(slot.bucket)

    def _arrived(self, slot: Slot) -> None:
        slot.fresh = False
        if not self._counts:
            return
        slot.bucket.missing -= 1
        if slot.bucket.missing == 0:
            self._reduction.bucket_is_full(slot.bucket, last=self._last)

    def _run(self, key: tuple[int, ...]) -> tuple[Bucket, slice] | None:
        if key not in self._runs:
            self._runs[key] = _side_by_side([self._slots[one] for one in key])
        return self._runs[key]


def _side_by_side(slots: Sequence[Slot]) -> tuple[Bucket, slice] | None:
    bucket, shape = slots[0].bucket, slots[0].parameter.shape[1:]
    for before, after in pairwise(slots):
        beside = after.bucket is bucket and after.start == before.end
        if not beside or after.parameter.shape[1:] != shape:
            return None
    return bucket, slice(slots[0].start, slots[-1].end)


def _product(
    gradient_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, *, fresh: bool
) -> None:
    """Write or add dy^T x; in two steps where it accumulates in another dtype than it is made."""
    if gradient_OI.dtype != x_NI.dtype:
        product_OI = dy_NO.t() @ x_NI
        if fresh:
            gradient_OI.copy_(product_OI)
        else:
            gradient_OI.add_(product_OI)
    elif fresh:
        torch.mm(dy_NO.t(), x_NI, out=gradient_OI)
    else:
        gradient_OI.addmm_(dy_NO.t(), x_NI)
