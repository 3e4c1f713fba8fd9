"""Where backward puts gradients: straight into the flat buckets, with nothing copied.

A kernel's backward gives its weight gradient here instead of to autograd: a matrix product writes
into the bucket (overwriting on the first microbatch, adding on the others), so there is no
gradient tensor of its own, no zeroing pass and no adding pass. When the last contribution of the
last microbatch has come, the bucket is complete and its reduction starts.

Weight gradients may be put off (`defer`): nothing in backward waits for them, so they are what is
computed while a collective is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from echelon.parallel.buckets import Bucket, Slot

Work = Callable[[], None]


class GradientStore:
    """Take the gradients of one rank's parameters, microbatch by microbatch."""

    def __init__(self, on_full: Callable[[Bucket], None]) -> None:
        """Call `on_full` with each bucket as its last contribution arrives."""
        self.buckets: Sequence[Bucket] = ()
        self._on_full = on_full
        self._slots: dict[int, Slot] = {}
        self._joined: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._deferred: list[Work] = []
        self._last = False

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Write into `buckets` from now on."""
        self.buckets = buckets
        self._slots = {id(slot.parameter): slot for bucket in buckets for slot in bucket.slots}

    def start_step(self) -> None:
        """Forget the gradients of the last step: the first contribution overwrites them."""
        for slot in self._slots.values():
            slot.fresh = True

    def start_backward(self, *, last: bool) -> None:
        """Begin the backward of one microbatch; `last` says that it completes the buckets."""
        self._last = last
        if last:
            for bucket in self.buckets:
                bucket.missing = sum(slot.uses for slot in bucket.slots)

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
        joined = self._join(parameters)
        return None if joined is None else joined[0]

    def add_product(
        self, parameters: Sequence[torch.Tensor], dy_NO: torch.Tensor, x_NI: torch.Tensor
    ) -> None:
        """Add dy^T x to the gradient of `parameters`, whose rows dy's columns are in order."""
        joined = self._join(parameters)
        if joined is not None:
            slots = [self._slots[id(parameter)] for parameter in parameters]
            _product(joined[1], dy_NO, x_NI, fresh=slots[0].fresh)
            for slot in slots:
                self._arrived(slot)
            return
        start = 0
        for parameter in parameters:
            slot, end = self._slots[id(parameter)], start + parameter.shape[0]
            _product(slot.gradient, dy_NO[:, start:end], x_NI, fresh=slot.fresh)
            self._arrived(slot)
            start = end

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient that was computed elsewhere."""
        slot = self._slots[id(parameter)]
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
        if slot.fresh:
            slot.gradient.zero_()
        slot.gradient.index_add_(0, rows_N, gradient_ND)
        self._arrived(slot)

    def _arrived(self, slot: Slot) -> None:
        slot.fresh = False
        if not self._last:
            return
        slot.bucket.missing -= 1
        if slot.bucket.missing == 0:
            self._on_full(slot.bucket)

    def _join(self, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._joined:
            self._joined[key] = self._find_joined([self._slots[one] for one in key])
        return self._joined[key]

    @staticmethod
    def _find_joined(slots: Sequence[Slot]) -> tuple[torch.Tensor, torch.Tensor] | None:
        bucket, shape = slots[0].bucket, slots[0].parameter.shape[1:]
        for before, after in pairwise(slots):
            beside = after.bucket is bucket and after.start == before.end
            if not beside or after.parameter.shape[1:] != shape:
                return None
        part = slice(slots[0].start, slots[-1].end)
        return (
            bucket.values[part].view(-1, *shape),
            bucket.gradients[part].view(-1, *shape),
        )


def _product(
    gradient_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, *, fresh: bool
) -> None:
    if fresh:
        torch.mm(dy_NO.t(), x_NI, out=gradient_OI)
    else:
        gradient_OI.addmm_(dy_NO.t(), x_NI)
