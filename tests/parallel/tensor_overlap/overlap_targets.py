"""What ranks run to look at products that overlap, the fused ones with kernels for CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from queue import Queue
from typing import Any, cast

import pytest
import torch
from torch import nn

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from echelon.parallel import tensor
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.tensor import ColumnLinear, TensorSplit
from echelon.parallel.tensor_overlap import RingOverlap, RowProduct, SymmetricMemoryOverlap
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.recorder import Recorder, WaitTime
from echelon.parallel.transport.symmetric_memory import OPERATORS
from tests.parallel.buckets import by_hand, matrix
from tests.parallel.targets import Pass, one_block, tensor_group


@contextmanager
def fused_on_cpu() -> Iterator[None]:
    """Run the fused operators on CPUs: PyTorch has what they mean as plain collectives.

    Those are what it runs for shapes; under CUDA it copies rows between the memories of GPUs.
    """
    module: Any = import_module("torch.distributed._symmetric_memory")
    library = torch.library.Library("symm_mem", "IMPL")
    try:
        for name in OPERATORS:
            library.impl(name, getattr(module, f"_{name}_fallback"), "CPU")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor, "require_symmetric_memory", lambda device: None)
            yield
    finally:
        library._destroy()


def one_fused_block(
    context: RankContext, argument: tuple[Plan, torch.Tensor, torch.Tensor, TokenBatch]
) -> Pass:
    """Run block 0 of a plan forward and backward, its fused products on a CPU."""
    with fused_on_cpu():
        return one_block(context, argument)


def fused_products(context: RankContext, argument: object) -> dict[str, Any]:
    """Return what both products make of rows that tell the ranks apart, and what they record."""
    del argument
    group, events = tensor_group(context)
    n, rank = context.world_size, context.rank
    weight = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    own = torch.full((2, 3), float(rank + 1), dtype=torch.float64)
    whole = torch.arange(6.0 * n, dtype=torch.float64).view(2 * n, 3) * (rank + 1)
    with fused_on_cpu():
        product, gathered = group.all_gather_product(own, weight, name="gather", keeps=True)
        alone, nothing = group.all_gather_product(own, weight, name="again", keeps=False)
        summed = group.product_reduce_scatter(whole, weight, name="scatter")
    return {
        "weight": weight,
        "product": product,
        "gathered": gathered,
        "alone": alone,
        "nothing": nothing,
        "summed": summed,
        "events": events.events,
    }


def summed_parts(context: RankContext, argument: object) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return every rank's part of the sum of this rank's rows, and that sum by the ring."""
    del argument
    group, _ = tensor_group(context)
    n = context.world_size
    generator = torch.Generator().manual_seed(5)
    # Of random sizes, so that each order of adding rounds otherwise.
    scales = torch.rand(n, 2 * n, 3, generator=generator) * 4
    parts = torch.randn(n, 2 * n, 3, generator=generator) * torch.pow(10.0, scales)
    product = RowProduct(multiply=lambda rows, out: out.copy_(rows), width=3, weight_IO=None)
    mine = slice(2 * context.rank, 2 * context.rank + 2)
    got = RingOverlap().product_scatter(parts[context.rank], product, group, name="sum")
    return [one[mine] for one in parts], got


def matrices_apart(
    context: RankContext, fused: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run two column layers, each in a bucket of its own, in one go; and what is right."""
    group, _ = tensor_group(context)
    store = GradientStore(Reduction())
    overlap = SymmetricMemoryOverlap() if fused else RingOverlap()
    split = TensorSplit(group=group, sequence_parallel=True, store=store, overlap=overlap)
    first, second = (nn.Linear(3, width, bias=False, dtype=torch.float64) for width in (4, 2))
    for number, one in enumerate((first, second)):
        one.weight.data.copy_(matrix(*one.weight.shape, seed=number + 10 * context.rank))
    weights = {
        name: cast(nn.Parameter, one.weight)
        for name, one in zip("ab", (first, second), strict=True)
    }
    store.hold(by_hand(weights, [["a"], ["b"]]))
    store.start_step()
    store.start_backward(last=True)
    rows = [matrix(2, 3, seed=20 + rank).detach() for rank in range(group.size)]
    x = rows[context.rank].clone().requires_grad_()
    y: Any = ColumnLinear.apply(x, [first, second], split)
    dy = matrix(*y.shape, seed=30 + context.rank).detach()
    y.backward(dy)
    store.run_deferred()
    both = torch.cat([first.weight, second.weight]).detach()
    of_all = [torch.empty(2 * group.size, 3, dtype=torch.float64) for _ in range(group.size)]
    for rank, part in enumerate(group.gather_objects(dy @ both)):
        of_all[rank].copy_(part)
    right = torch.stack(of_all).sum(0)[2 * context.rank : 2 * context.rank + 2]
    assert x.grad is not None
    gradients = torch.cat([slot.gradient for bucket in store.buckets for slot in bucket.slots])
    whole = torch.cat(rows)
    return [y.detach(), x.grad, gradients], [whole @ both.t(), right, dy.t() @ whole]


class _ThreadedGroup:
    """A member of a group whose members are threads: messages wait in queues."""

    def __init__(self, index: int, queues: list[Queue[torch.Tensor]]) -> None:
        self.index, self.size, self._queues = index, len(queues), queues
        self.recorder = Recorder(index, NoEvents())

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        """Put what is sent into the queue of its place; take what is received at the wait."""
        del name
        assert list(sends) == [(self.index + 1) % self.size]
        assert list(receives) == [(self.index - 1) % self.size]
        for place, sent in sends.items():
            self._queues[place].put(sent.clone())
        (received,) = receives.values()
        received.fill_(float("nan"))  # until it is awaited

        def take(waited: WaitTime) -> None:
            received.copy_(self._queues[self.index].get(timeout=20))

        return Pending(finish=take)


def threaded_ring(
    size: int, own: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Return what each of `size` ranks makes of its rows of `own`, and of its `parts`."""
    product = RowProduct(
        multiply=lambda rows, out: torch.mm(rows, weight.t(), out=out),
        width=len(weight),
        weight_IO=None,
    )
    queues: list[Queue[torch.Tensor]] = [Queue() for _ in range(size)]

    def run(rank: int) -> tuple[Any, torch.Tensor]:
        group = cast(Group, _ThreadedGroup(rank, queues))
        ring = RingOverlap()
        y, whole = ring.gather_product(own[rank], product, group, name="gather", keeps=True)
        assert whole is not None
        return (y, whole), ring.product_scatter(parts[rank], product, group, name="sum")

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    return [one for one, _ in found], [one for _, one in found]
