# SPDX-License-Identifier: Apache-2.0
"""Where backward puts gradients: straight into the flat buckets, with nothing copied.

A kernel's backward gives its weight gradient here instead of to autograd: a matrix product writes
into the bucket (overwriting on the first microbatch, adding on the others), so there is no
gradient tensor of its own, no zeroing pass and no adding pass. When the last contribution has
come, the bucket is complete and its reduction starts: once per step, or after every microbatch
where slices add up (`accumulates_slices` in `layout/buckets.py`).

Weight gradients may be put off (`defer`): nothing in backward waits for them, so they are what is
computed while a collective is in flight. Where a schedule splits the backward pass (B and W), all
of them are: B `collects` them, with what they need, and W runs that queue. It is a list of
closures, not a search of the autograd graph, so it holds for any layer that writes its gradients
here, whatever is recomputed, gathered or split around it (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.models.precision import LOW_PRECISION
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.matmul import add_product

ComputeGradient = Callable[[], None]


@dataclass(frozen=True, slots=True)
class DeferredWeightGradient:
    """A weight gradient that is still to be computed; `start` fetches what it needs, if anything.

    Ranks that start a collective in it do so in the same order, as they run the same queue.
    """

    run: ComputeGradient
    start: ComputeGradient | None = None


class Reduction:
    """Whoever sums buckets over ranks; this one, for one data rank, over nobody."""

    def before_write(self, bucket: Bucket) -> None:
        """Learn that gradients are about to be written into a bucket; give it its memory."""

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Learn that all gradients of a bucket are there; `last`: of the whole step."""


class GradientStore:
    """Take the gradients of one rank's parameters, microbatch by microbatch."""

    def __init__(self, reduction: Reduction, pieces: PieceSizes = TRAINING_PIECES) -> None:
        """Tell `reduction` of full buckets: after every microbatch, or after the last one."""
        self.buckets: Sequence[Bucket] = ()
        self._reduction, self._pieces = reduction, pieces
        self._slots: dict[int, Slot] = {}
        self._runs: dict[tuple[int, ...], tuple[Bucket, slice] | None] = {}
        self._values: dict[tuple[int, ...], torch.Tensor] = {}
        self._gradients: dict[tuple[int, ...], torch.Tensor] = {}
        self._deferred: list[DeferredWeightGradient] = []
        self._collected: list[DeferredWeightGradient] | None = None
        self._by_stage: dict[int, list[Bucket]] = {}
        self._ended: set[int] = set()

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Write into `buckets` from now on."""
        self.buckets = buckets
        self._slots = {id(slot.parameter): slot for bucket in buckets for slot in bucket.slots}
        self._by_stage = {}
        for bucket in buckets:
            for stage in () if bucket.plan.frozen else bucket.plan.stages:
                self._by_stage.setdefault(stage, []).append(bucket)

    def start_step(self) -> None:
        """Forget the gradients of the last step: the first contribution overwrites them."""
        self._ended.clear()
        for slot in self._slots.values():
            slot.fresh = True

    def start_backward(self, stage: int = 0, *, last: bool) -> None:
        """Begin to take the gradients of one microbatch on `stage`; `last`: of its last one.

        A bucket is summed after the last microbatch of all stages that use it, or after each.
        """
        if last:
            self._ended.add(stage)
        for bucket in self._by_stage.get(stage, ()):
            bucket.ends = self._ended.issuperset(bucket.plan.stages)
            bucket.missing = 0
            if bucket.ends or bucket.adds_slices:
                bucket.missing = sum(slot.uses for slot in bucket.slots)
            if bucket.adds_slices:
                for slot in bucket.slots:
                    slot.fresh = True

    @contextmanager
    def collects(self) -> Iterator[list[DeferredWeightGradient]]:
        """Keep all weight gradients of the backward inside for `run_collected`, in its order."""
        self._collected = work = []
        try:
            yield work
        finally:
            self._collected = None

    def run_collected(self, work: list[DeferredWeightGradient]) -> None:
        """Compute weight gradients that were collected; each lets go of what it needed.

        What one of them has to fetch is on its way while the one before is computed.
        """
        queue = work[::-1]
        work.clear()
        _start(queue[-1:])
        with torch.no_grad():
            while queue:
                one = queue.pop()
                _start(queue[-1:])
                one.run()

    def defer(self, run: ComputeGradient, start: ComputeGradient | None = None) -> None:
        """Keep a weight gradient for later: for the next time that something is in flight.

        Where it has something to fetch (`start`), that is such a time for what waits already.
        """
        if self._collected is not None:
            self._collected.append(DeferredWeightGradient(run, start))
            return
        if start is not None:
            start()
            self.run_deferred()
        self._deferred.append(DeferredWeightGradient(run))

    def run_deferred(self) -> None:
        """Compute the weight gradients that were put off, but those that W is to compute."""
        deferred, self._deferred = self._deferred, []
        with torch.no_grad():  # inside of backward it is so already, after it not
            for work in deferred:
                work.run()

    def matrices(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return matrices of equal width that lie side by side as one; None if they do not."""
        key = tuple(id(parameter) for parameter in parameters)
        run = self._run(key)
        if run is None:
            return None
        if key not in self._values:
            bucket, part = run
            self._values[key] = bucket.values_memory.rows(bucket.values[part], parameters[0])
        return self._values[key]

    def scales(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the scales of matrices that lie side by side, where codes of them are gathered."""
        run = self._run(tuple(id(parameter) for parameter in parameters))
        if run is None or run[0].fp8 is None:
            return None
        return run[0].fp8.scales_of(run[1], parameters[0].shape[1])

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether gradients of a tensor are taken here: whether it is such a parameter."""
        return id(parameter) in self._slots

    def trains(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter takes a gradient: what is frozen does not."""
        return not self._slots[id(parameter)].bucket.plan.frozen

    def widens(self, parameter: torch.Tensor, made: torch.dtype) -> bool:
        """Return whether a gradient adds up in another dtype than its products would be made in."""
        return self._slots[id(parameter)].gradient.dtype != made

    def takes_parts(self, parameter: torch.Tensor) -> bool:
        """Return whether a product for a gradient may be given now, some tokens at a time.

        In bf16 or fp16 each part would be rounded where it is added. What is frozen takes none.
        """
        slot = self._slots[id(parameter)]
        if slot.bucket.plan.frozen:
            return True
        return self._collected is None and slot.gradient.dtype not in LOW_PRECISION

    def add_matmul(
        self,
        parameters: Sequence[torch.Tensor],
        dy_NO: torch.Tensor,
        x_NI: torch.Tensor,
        *,
        more: bool = False,
    ) -> None:
        """Add dy^T x to the gradient of `parameters`, whose rows dy's columns are in order.

        `more`: it is a part of that product, and the last one comes after it. What is frozen takes
        no gradient.
        """
        if not self.trains(parameters[0]):
            return
        if self._collected is not None:
            self.defer(partial(self.add_matmul, parameters, dy_NO, x_NI, more=more))
            return
        key = tuple(id(parameter) for parameter in parameters)
        run = self._run(key)
        if run is None:
            parts = dy_NO.split([len(parameter) for parameter in parameters], dim=1)
            for parameter, part in zip(parameters, parts, strict=True):
                self.add_matmul([parameter], part, x_NI, more=more)
            return
        slots = [self._slots[one] for one in key]
        self._open(slots[0])
        sum_OI = self._sum_of(key, run, parameters[0])
        rows = self._pieces.product_rows
        add_product(sum_OI, dy_NO, x_NI, fresh=slots[0].fresh, num_rows=rows)
        for slot in slots:
            if more:
                slot.fresh = False
            else:
                self._gradient_is_there(slot)

    def add_stack(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        add: Callable[[Sequence[torch.Tensor], bool], None],
    ) -> None:
        """Let `add` write the gradients of several groups of parameters at once.

        The parameters of a group lie side by side, those of all in one bucket. It is given the sums
        of the groups, and whether they are to be overwritten.
        """
        if not self.trains(groups[0][0]):
            return
        if self._collected is not None:
            self.defer(partial(self.add_stack, groups, add))
            return
        sums: list[torch.Tensor] = []
        slots = [self._slots[id(parameter)] for group in groups for parameter in group]
        fresh = slots[0].fresh
        assert all(slot.fresh is fresh for slot in slots), "they are added to together"
        self._open(slots[0])
        for group in groups:
            key = tuple(id(parameter) for parameter in group)
            run = self._run(key)
            assert run is not None, "the parameters of a group lie side by side"
            sums.append(self._sum_of(key, run, group[0]))
        add(sums, fresh)
        for slot in slots:
            self._gradient_is_there(slot)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient that was computed elsewhere."""
        if not self.trains(parameter):
            return
        if self._collected is not None:
            self.defer(partial(self.add, parameter, gradient))
            return
        slot = self._slots[id(parameter)]
        self._open(slot)
        if slot.fresh:
            slot.gradient.copy_(gradient)
        else:
            slot.gradient.add_(gradient)
        self._gradient_is_there(slot)

    def place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return where the first gradient of a parameter may be written instead of being added.

        None where another came before it, or it would be cast. `written` must follow.
        """
        slot = self._slots.get(id(parameter))
        if slot is None or not slot.fresh or slot.bucket.plan.frozen:
            return None
        if self._collected is not None or slot.gradient.dtype != parameter.dtype:
            return None
        self._open(slot)
        return slot.gradient.view(slot.gradient.shape)

    def written(self, parameter: torch.Tensor) -> None:
        """Learn that a gradient is at the `place` of its parameter."""
        self._gradient_is_there(self._slots[id(parameter)])

    def add_rows(
        self, parameter: torch.Tensor, rows_N: torch.Tensor, gradient_ND: torch.Tensor
    ) -> None:
        """Add row n of a gradient to row `rows_N[n]` of the parameter's."""
        if not self.trains(parameter):
            return
        if self._collected is not None:
            self.defer(partial(self.add_rows, parameter, rows_N, gradient_ND))
            return
        slot = self._slots[id(parameter)]
        self._open(slot)
        if slot.fresh:
            slot.gradient.zero_()
        add_rows(slot.gradient, rows_N, gradient_ND.to(slot.gradient.dtype))
        self._gradient_is_there(slot)

    def _sum_of(
        self, key: tuple[int, ...], run: tuple[Bucket, slice], like: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradients of parameters that lie side by side, as one matrix."""
        if key not in self._gradients:
            bucket, part = run
            self._gradients[key] = bucket.gradients_memory.rows(bucket.gradients[part], like)
        return self._gradients[key]

    def _open(self, slot: Slot) -> None:
        if slot.fresh:
            self._reduction.before_write(slot.bucket)

    def _gradient_is_there(self, slot: Slot) -> None:
        slot.fresh = False
        bucket = slot.bucket
        bucket.missing -= 1
        if bucket.missing == 0:
            self._reduction.bucket_is_full(bucket, last=bucket.ends)

    def _run(self, key: tuple[int, ...]) -> tuple[Bucket, slice] | None:
        if key not in self._runs:
            self._runs[key] = _side_by_side([self._slots[one] for one in key])
        return self._runs[key]


def _start(work: Iterable[DeferredWeightGradient]) -> None:
    for one in work:
        if one.start is not None:
            one.start()


def _side_by_side(slots: Sequence[Slot]) -> tuple[Bucket, slice] | None:
    bucket, shape = slots[0].bucket, slots[0].parameter.shape[1:]
    for before, after in pairwise(slots):
        beside = after.bucket is bucket and after.start == before.end
        if not beside or after.parameter.shape[1:] != shape:
            return None
    return bucket, slice(slots[0].start, slots[-1].end)


def add_rows(sum_VD: torch.Tensor, rows_N: torch.Tensor, added_ND: torch.Tensor) -> None:
    """Add row n to row `rows_N[n]` of a sum, always in one order.

    On a GPU `index_add_` adds in any order, and `index_put_` sorts the rows first
    (`index_put_with_sort` in PyTorch's `native/cuda/Indexing.cu`). PyTorch's own gradient of an
    embedding sorts, too, but makes a second table of all rows.
    """
    if sum_VD.device.type == "cpu":
        sum_VD.index_add_(0, rows_N, added_ND)
    else:
        sum_VD.index_put_((rows_N,), added_ND, accumulate=True)
